"""Networks of the user's own in model files: by what name they are known, which code they had, when they are built.

A file is anybody's, and a name in it is only a name: "os:system" could be one. Nothing is imported because a file says
so, but where the user has named it (`allow`): as an option of a command or in Python, or in the config of the run that
is given. The name in a run's config alone opens no installed package and nothing of Python's own.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qupel.deploy.about import About
from qupel.deploy.header import FormatError
from qupel.tasks import zoo
from qupel.util.errors import UserError
from qupel.util.registry import imported


@dataclass(frozen=True)
class Allowed:
    """What a file may make us import: `name`, which the user gave. loose: only modules that are in no package that is
    installed; changed: also where its code is not what it was."""

    name: str = ""
    loose: bool = False
    changed: bool = False


NOTHING = Allowed()


def modules_here() -> None:
    """Modules of one's own may stand in the folder where one works."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def facts(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """What a file says of a network that a config names, as fields of `About`."""
    if name in zoo.networks:
        return {"model": name, "args": args}
    return {"model": name, "args": args, "source": source(name), "needs": needs(name)}


def source(name: str) -> str:
    """The sha256 of the code of the module in "module:Name"; "" where it has none that can be read."""
    imported(name, "network")
    path = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else ""


def needs(name: str) -> dict[str, str]:
    """Versions of torch and, where the module comes with a package, of that."""
    top = name.partition(":")[0].partition(".")[0]
    found = {"torch": torch.__version__.partition("+")[0]}
    for package in _distributions().get(top, ()):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Top-level modules -> the packages they come with; a second's work, where every client's file asks for it."""
    return packages_distributions()


def is_installed(name: str) -> bool:
    """Whether "module:Name" is of Python itself or of an installed package. Nothing is imported."""
    top = name.partition(":")[0].partition(".")[0]
    if top in sys.stdlib_module_names:
        return True
    spec = find_spec(top)
    places = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    files = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(Path(f).resolve().is_relative_to(place) for f in files if f for place in places)


def build(about: About, allowed: Allowed = NOTHING) -> nn.Module:
    """The network of the user's own that a file names, at its initial weights."""
    name = about.model
    if not name:
        if not allowed.name:
            raise UserError(
                "the file names no model: the network is your own. In Python, qupel.load(FILE, module) fills it; "
                "here --model my_module:Name builds it; an ONNX file of it runs without its code"
            )
        name = allowed.name
    elif allowed.name != name:
        said = f", not {allowed.name!r}" if allowed.name else ""
        known = "" if ":" in name else f"; without your module only these can be built: {', '.join(zoo.networks)}"
        hint = f"; if that is code of yours, say so: --model {name}" if ":" in name else known
        raise UserError(f"the file names the model {name!r}{said}{hint}")
    if allowed.loose and is_installed(name):
        raise UserError(f"the run's config names {name!r}, of an installed package; say so yourself: --model {name}")
    if about.model and about.source and not allowed.changed and source(name) != about.source:
        module = name.partition(":")[0]
        raise UserError(
            f"the code of {module!r} is not what it was when the file was made; --changed takes it as it is"
        )
    return zoo.build(name, about.input_shape, about.classes or None, 0, about.args)


def check_args(about: About, tensors: int) -> None:
    """Settings of a network of ours that come from a file of so many tensors: nothing that takes for ever to build."""
    for key, value in about.args.items():
        numbers = value if isinstance(value, list) else [value]
        most = tensors if key == "layers" else 1 << 16
        if len(numbers) > tensors or any(type(v) is not int or not 1 <= v <= most for v in numbers):
            raise FormatError(f"about.args.{key[:40]}: must be whole numbers from 1 to {most:,}")
