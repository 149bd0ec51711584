"""A run folder that was damaged, then resumed: the result of one that was not, or one clear line. Never a traceback,
never another result in silence."""

import json
import random
import shutil
from pathlib import Path

import pytest

from qupel.engine.rounds import Stopped
from qupel.run import config as configs
from qupel.run.experiment import run_experiment
from qupel.util.errors import UserError
from qupel.util.files import Damaged, read_json, write_sealed
from test_crash import CONFIG as WHOLE
from test_crash import outcome

CONFIG = WHOLE.replace('[methods.Local]\nrecipe = "local-prox"\n', "").replace(
    "checkpoint_every = 2", "checkpoint_every = 1"
)
AFTER = 16  # rounds until the run is stopped: one cell is done, the other in the middle


def stop_after(out, rounds):
    seen = []
    with pytest.raises(Stopped):
        run_experiment(configs.parse(CONFIG, "c"), out, watch=lambda cell, progress: seen.append(progress),
                       should_stop=lambda: len(seen) >= rounds - 1)  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "r"
    stop_after(folder, AFTER)
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "r"
    run_experiment(configs.parse(CONFIG, "c"), folder)
    return outcome(folder)


def resume(folder, expected, capsys) -> str:
    """How a damaged run ends: "same" (with or without a warning), or its one line."""
    capsys.readouterr()
    said = ""
    try:
        run_experiment(configs.parse(CONFIG, "c"), folder, resume=True)
    except UserError as e:
        said = str(e)
    if said:
        assert "\n" not in said
        assert str(folder) in said
        return said
    assert outcome(folder) == expected
    said = capsys.readouterr().err
    return f"same; {said}" if said else "same"


def flip(path: Path, at: float, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(at * len(data)), len(data) - 1)] ^= 1 << bit
    path.write_bytes(data)


def cut(path: Path, at: float) -> None:
    path.write_bytes(path.read_bytes()[: int(at * path.stat().st_size)])


def swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def checkpoint(folder: Path, age: int = 0) -> Path:
    """A checkpoint of the unfinished cell, 0: the newest."""
    return sorted(folder.glob("cells/Twin-s0/checkpoints/round-*"), reverse=True)[age]


DONE, GOING = "cells/QuPeL-s0", "cells/Twin-s0"
IN_CHECKPOINT = ("meta.json", "w.bin", "states", "shard-0.json")
IN_RUN = ("config.json", "identity.json", f"{DONE}/result.json", f"{DONE}/metrics.jsonl", f"{DONE}/engine.json",
          f"{DONE}/models/client-001.safetensors", f"{GOING}/engine.json")  # fmt: skip


@pytest.mark.parametrize("name", IN_CHECKPOINT)
@pytest.mark.parametrize("damage", [lambda p: flip(p, 0.1), lambda p: flip(p, 0.9, 6), lambda p: cut(p, 0.5),
                                    lambda p: cut(p, 0.0), Path.unlink])  # fmt: skip
def test_a_damaged_checkpoint_is_not_believed_and_the_one_before_it_is_used(
    stopped, expected, tmp_path, capsys, name, damage
):
    folder = tmp_path / "r"
    shutil.copytree(stopped, folder)
    newest = checkpoint(folder)
    damage(max((newest.parent / "states").iterdir()) if name == "states" else newest / name)
    before = checkpoint(folder, 1).name
    said = resume(folder, expected, capsys)
    assert said.startswith("same; warning: ")
    assert f"going on from {before}" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("damage", [lambda p: flip(p, 0.3), lambda p: cut(p, 0.5), Path.unlink])
@pytest.mark.parametrize("name", IN_RUN)
def test_a_damaged_file_of_a_run_is_said_in_a_line(stopped, expected, tmp_path, capsys, name, damage):
    folder = tmp_path / "r"
    shutil.copytree(stopped, folder)
    damage(folder / name)
    said = resume(folder, expected, capsys)
    rebuilt = damage is Path.unlink and name in {"identity.json", f"{DONE}/result.json", f"{GOING}/engine.json"}
    assert said == "same" if rebuilt else said.startswith(str(folder)), said


def test_swapped_files_and_folders(stopped, expected, tmp_path, capsys):
    for k, (one, other) in enumerate([
        (f"{DONE}/metrics.jsonl", f"{GOING}/metrics.jsonl"),
        ("config.json", "identity.json"),
        (f"{DONE}/models/client-000.safetensors", f"{DONE}/models/client-002.safetensors"),
        (f"{GOING}/checkpoints", next(p for p in stopped.glob("shared/*/checkpoints")).relative_to(stopped)),
    ]):  # fmt: skip
        folder = tmp_path / str(k)
        shutil.copytree(stopped, folder)
        swap(folder / one, folder / other)
        assert resume(folder, expected, capsys).startswith(str(folder))
    folder = tmp_path / "inside"
    shutil.copytree(stopped, folder)
    swap(checkpoint(folder) / "meta.json", checkpoint(folder) / "shard-0.json")
    assert resume(folder, expected, capsys).startswith("same; warning")
    folder = tmp_path / "moved"
    shutil.copytree(stopped, folder)
    swap(checkpoint(folder), checkpoint(folder, 1))
    assert resume(folder, expected, capsys).startswith("same; warning")


def test_where_no_checkpoint_is_sound_one_line_says_so(stopped, expected, tmp_path, capsys):
    folder = tmp_path / "r"
    shutil.copytree(stopped, folder)
    for age in range(3):
        flip(checkpoint(folder, age) / "w.bin", 0.5)
    said = resume(folder, expected, capsys)
    assert "no older checkpoint is sound" in said
    shutil.rmtree(folder / GOING / "checkpoints")  # as it says
    assert resume(folder, expected, capsys) == "same"


def test_a_damaged_log(stopped, expected, tmp_path, capsys):
    """Its end: rounds that run again anyway, or an older checkpoint fits. Its beginning: nothing fits."""
    for at, ends in ((0.02, "is damaged: its lines are not those of"), (0.999, "same")):
        folder = tmp_path / str(at)
        shutil.copytree(stopped, folder)
        flip(folder / GOING / "metrics.jsonl", at)
        assert ends in resume(folder, expected, capsys)


def test_a_sealed_file_by_hand(tmp_path):
    path = tmp_path / "a.json"
    write_sealed(path, {"b": [1.5, float("inf")], "a": {"2": None}})
    assert read_json(path, sealed=True) == {"b": [1.5, float("inf")], "a": {"2": None}}
    shutil.copy(path, tmp_path / "b.json")
    with pytest.raises(Damaged, match="its checksum is wrong"):
        read_json(tmp_path / "b.json")
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}  # of an older version
    with pytest.raises(Damaged):
        read_json(path, sealed=True)
    path.write_bytes(b"\xff{")
    with pytest.raises(Damaged, match="not JSON"):
        read_json(path)


def randomly(folder: Path, rng: random.Random) -> str:
    """Damage one file or folder somehow."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "lock")
    path = rng.choice(files)
    kind = rng.choice(["flip", "flip", "flip", "cut", "grow", "zero", "delete", "delete folder", "swap"])
    if kind == "flip":
        flip(path, rng.random(), rng.randrange(8)) if path.stat().st_size else None
    elif kind == "cut":
        cut(path, rng.random())
    elif kind == "grow":
        path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 40)))
    elif kind == "zero":
        path.write_bytes(bytes(path.stat().st_size))
    elif kind == "delete":
        path.unlink()
    elif kind == "delete folder":
        shutil.rmtree(rng.choice(sorted(p for p in folder.rglob("*") if p.is_dir())))
    else:
        swap(path, rng.choice([p for p in files if p != path]))
    return f"{kind} {path.relative_to(folder)}"


def damaged_at_random(stopped, expected, tmp_path, capsys, seeds):
    ends = {}
    for seed in seeds:
        folder = tmp_path / "r"
        shutil.copytree(stopped, folder)
        what = randomly(folder, random.Random(seed))
        try:
            said = resume(folder, expected, capsys)
        except Exception as e:
            raise AssertionError(f"seed {seed}: {what}") from e
        ends[seed, what] = said.split(" ")[0] if said.startswith("same") else "line"
        shutil.rmtree(folder)
    return ends


def test_damaged_at_random(stopped, expected, tmp_path, capsys):
    ends = damaged_at_random(stopped, expected, tmp_path, capsys, range(8))
    assert set(ends.values()) <= {"same", "same;", "line"}


@pytest.mark.slow
def test_damaged_at_random_200_times(stopped, expected, tmp_path, capsys):
    ends = damaged_at_random(stopped, expected, tmp_path, capsys, range(1000, 1200))
    with capsys.disabled():
        print(json.dumps({k: list(ends.values()).count(k) for k in ("same", "same;", "line")}))
