"""Settings of every test: decoded images go to a cache of this session, torch computes with one thread."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder for all workers of the session, so that an image set is decoded at most once."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    before = os.environ.get("QUPEL_CACHE")
    os.environ["QUPEL_CACHE"] = str(shared / "qupel-cache")
    torch.set_num_threads(1)
    yield
    if before is None:
        del os.environ["QUPEL_CACHE"]
    else:
        os.environ["QUPEL_CACHE"] = before
