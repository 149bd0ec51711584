"""A run on a device keeps everything there, gives the bits of the CPU, and can be resumed."""

import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from pretend import CUDA, Pretend
from qupel.core.optim import Adam
from qupel.engine.checkpoint import Checkpoints
from qupel.engine.inline import Inline
from qupel.engine.rounds import run
from qupel.parts.methods.local import Local
from qupel.parts.phase import Phase
from qupel.parts.quantizers.afterwards import Afterwards
from qupel.parts.quantizers.binaryrelax import BinaryRelax
from qupel.parts.quantizers.prox import Prox
from qupel.parts.quantizers.proxquant import ProxQuant
from qupel.util.errors import UserError
from qupel.util.machine import check_device
from tiny import blobs, final_models, local, make_job, mlp, recipe, run_inline, same, timeless

SOFT = Prox(mode="soft", init="kmeans", center_gradient="mean", carry=True)
CASES = {
    "recipe": lambda: make_job(recipe(1, 2, 1)),
    "soft, first order": lambda: make_job([Phase(Local(quantizer=SOFT), 2), *local(1, optimizer=Adam())]),
    "competitors": lambda: make_job(
        [
            Phase(Local(quantizer=ProxQuant()), 2),
            Phase(Local(quantizer=BinaryRelax()), 2),
            Phase(Local(quantizer=Afterwards()), 1),
        ]
    ),
    "BatchNorm": lambda: make_job(recipe(1, 1, 1), module=normed()),
    "weighted, sampled": lambda: make_job(recipe(1, 2, 1), weighted=True, sample=0.5),
}


def normed():
    torch.manual_seed(0)
    first, *rest = mlp()
    return nn.Sequential(first, nn.BatchNorm1d(first.out_features), *rest)


@pytest.mark.parametrize("case", CASES)
def test_a_device_gives_the_bits_of_the_cpu(case):
    job = CASES[case]()
    finished, models = run_inline(job)
    with Pretend():
        there, theirs = run_inline(job.to(CUDA))
        theirs = [m.cpu() for m in theirs]
        assert {row.device for row in there.w} == {CUDA}
    assert timeless(there.lines) == timeless(finished.lines)
    assert same(theirs, models)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_run_on_a_device_is_resumed(tmp_path, store):
    job = make_job(recipe(2, 3, 1), sizes=(8, 8))
    finished, models = run_inline(job)
    with Pretend():
        moved = job.to(CUDA)
        half = [Phase(p.method, rounds) for p, rounds in zip(job.phases, (2, 2, 0), strict=True)]
        first, rest = Checkpoints(tmp_path, "same"), Checkpoints(tmp_path, "same")
        with Inline(moved.with_phases(half), store=store, scratch=tmp_path) as engine:
            run(moved.with_phases(half), engine, checkpoints=first)
        with Inline(moved, store=store, scratch=tmp_path) as engine:
            there = run(moved, engine, checkpoints=rest)
            theirs = [m.cpu() for m in final_models(moved, engine, there.w)]
    assert same(there.w, finished.w)
    assert same(theirs, models)


def test_the_pretended_device_refuses_what_a_real_one_refuses():
    data, _ = blobs()
    with Pretend():
        there, here = data.train.inputs.to(CUDA), data.train.inputs
        assert (there.device, here.device) == (CUDA, torch.device("cpu"))
        with pytest.raises(RuntimeError, match="two devices"):
            there + here
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:99", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_is_not_there_is_one_line(name):
    with pytest.raises(UserError, match=f"device '{name}'.*allowed"):
        check_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_command_says_so(tmp_path):
    command = [sys.executable, "-m", "qupel", "reproduce", "table2", "--scale", "smoke", "--device", "cuda"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "device 'cuda'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked to keep memory")
def test_a_process_that_trains_keeps_its_memory():
    """Blocks of 8 MB, taken and freed: the pages of the first are those of all others."""
    code = """
import resource, torch
from qupel.util.machine import keep_memory
keep_memory()
def faults():
    for _ in range(20):
        torch.ones(2**21)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(-faults() + faults())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**23 // 4096
