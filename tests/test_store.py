"""Client stores and snapshots: what goes in comes out, to the bit, whoever wrote it."""

import gc
import os

import pytest
import torch
from torch import nn

from qupel.core.codebook import Codebook
from qupel.core.layout import Layout
from qupel.engine.checkpoint import Checkpoints, Since
from qupel.engine.rows import Forms
from qupel.engine.store import DiskStore, MemoryStore
from qupel.parts.base import State
from qupel.util.errors import UserError
from tiny import make_job, mlp, recipe, run_inline, same, timeless

LAYOUT = Layout.of(mlp())
FORMS = Forms(layout=lambda client: LAYOUT, state=lambda phase: State)
W = torch.full((LAYOUT.size,), 3.0)

MEMORY = (W - 1, torch.tensor([[1.5, 2.5]]))  # a server's own


def random_state(seed, m=4, memory=1):
    g = torch.Generator().manual_seed(seed)
    book = Codebook((LAYOUT["2.weight"],), (torch.randn(m, generator=g).sort().values,)) if m else Codebook()
    moments = tuple(torch.randn(LAYOUT.size, generator=g) for _ in range(memory))
    return State(torch.randn(LAYOUT.size, generator=g), torch.zeros(LAYOUT.size), book, moments)


def assert_equal(got, phase, state):
    at, found = got
    assert at == phase
    assert torch.equal(found.x, state.x)
    assert torch.equal(found.w, W)  # the w that the client is given, never a stored one
    assert [s.name for s in found.codebook.slots] == [s.name for s in state.codebook.slots]
    assert same(found.codebook.centers, state.codebook.centers)
    assert same(found.memory, state.memory)


@pytest.fixture(params=["memory", "disk"])
def make_store(request, tmp_path):
    return lambda: MemoryStore(FORMS) if request.param == "memory" else DiskStore(FORMS, tmp_path)


def test_put_and_get(make_store):
    store = make_store()
    assert store.get(3, W) is None
    states = {i: random_state(i, m=[0, 2, 4, 16][i % 4], memory=i % 3) for i in range(8)}
    for i, s in states.items():
        store.put(i, i % 2, s)
    for i in (7, 0, 3, 4, 1, 2, 6, 5):
        assert_equal(store.get(i, W), i % 2, states[i])
    assert store.get(8, W) is None


def test_a_state_may_grow_and_shrink(make_store):
    """A phase with momentum or more centers needs more room than the one before it."""
    store = make_store()
    store.put(0, 0, random_state(1, m=0, memory=0))
    store.put(1, 0, random_state(2, m=0, memory=0))
    for phase, (m, memory) in enumerate([(16, 2), (2, 0), (4, 1), (0, 2)], 1):
        s = random_state(10 + phase, m=m, memory=memory)
        store.put(0, phase, s)
        assert_equal(store.get(0, W), phase, s)
        assert_equal(store.get(1, W), 0, random_state(2, m=0, memory=0))


def test_what_was_read_can_be_worked_on_without_changing_the_store(tmp_path):
    store = DiskStore(FORMS, tmp_path)
    s = random_state(0)
    store.put(0, 0, s)
    _, found = store.get(0, W)
    found.x.add_(1)
    assert_equal(store.get(0, W), 0, s)


def test_the_scratch_file_has_no_name_and_goes_with_the_store(tmp_path):
    store = DiskStore(FORMS, tmp_path)
    store.put(0, 0, random_state(0))
    assert list(tmp_path.iterdir()) == []
    handle = store.file
    os.fstat(handle)
    del store
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


@pytest.mark.parametrize("reader", ["memory", "disk"])
def test_snapshots_of_several_shards_are_read_by_any_other_sharding(make_store, reader, tmp_path):
    states = {i: random_state(i, m=[4, 0][i % 2], memory=i % 3) for i in range(7)}
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for shard in range(3):
        store = make_store()
        for i in range(shard, 7, 3):
            store.put(i, 1, states[i])
        store.save(folder, f"shard-{shard}")
    for mine in ([0, 1], [2, 3, 4, 5, 6]):
        store = MemoryStore(FORMS) if reader == "memory" else DiskStore(FORMS, tmp_path)
        store.load(folder, mine)
        for i in range(7):
            if i in mine:
                assert_equal(store.get(i, W), 1, states[i])
            else:
                assert store.get(i, W) is None


def test_disk_and_memory_give_the_same_run(tmp_path):
    job = make_job(recipe(), sizes=(12, 5, 30, 12), sample=0.75)
    (a, models), (b, others) = run_inline(job), run_inline(job, store="disk", scratch=tmp_path)
    assert same(a.w, b.w)
    assert same(models, others)
    assert timeless(a.lines) == timeless(b.lines)


# --- checkpoints ---


def nothing(folder):
    MemoryStore(FORMS).save(folder, "shard-0")


def test_a_checkpoint_is_complete_or_absent(tmp_path):
    """A save that fails half-way leaves the one before it, and nothing of its own."""
    checkpoints = Checkpoints(tmp_path, "f")
    checkpoints.save(3, (W, 2 * W), MEMORY, Since({"loss": [0.5]}, ["client 1: bad"]), nothing)

    def fail(folder):
        (folder / "shard-0.bin").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoints.save(6, (W + 1,), (), Since(), fail)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["round-000003"]
    rounds, w, memory, since, folder, *_ = checkpoints.load(LAYOUT)
    assert (rounds, folder.name) == (3, "round-000003")
    assert since == Since({"loss": [0.5]}, ["client 1: bad"])
    assert same(w, (W, 2 * W))
    assert same(memory, MEMORY)
    checkpoints.save(6, (W + 1,), (), Since(), nothing)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["round-000003", "round-000006"]
    assert same(checkpoints.load(LAYOUT).w, (W + 1,))
    assert checkpoints.load(LAYOUT).memory == ()


def test_what_a_killed_run_left_is_ignored_and_cleared(tmp_path):
    checkpoints = Checkpoints(tmp_path, "f")
    checkpoints.save(2, (W,), (), Since(), nothing)
    half = tmp_path / "checkpoints" / ".round-000004.999"
    half.mkdir()
    (half / "w.bin").write_bytes(b"123")
    assert checkpoints.load(LAYOUT)[0] == 2
    checkpoints.save(4, (W,), (), Since(), nothing)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["round-000002", "round-000004"]


def test_the_last_few_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, "f", keep=2)
    for rounds in (2, 4, 6):
        checkpoints.save(rounds, (W,), (), Since(), nothing)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["round-000004", "round-000006"]
    assert checkpoints.load(LAYOUT).rounds == 6
    assert checkpoints.load(LAYOUT, before=6).rounds == 4
    assert checkpoints.load(LAYOUT, before=4) is None


def test_another_runs_checkpoint_is_refused(tmp_path):
    Checkpoints(tmp_path, "a").save(2, (W,), (), Since(), nothing)
    with pytest.raises(UserError, match="other settings"):
        Checkpoints(tmp_path, "b").load(LAYOUT)
    with pytest.raises(UserError, match=f"{len(W)} parameters"):
        Checkpoints(tmp_path, "a").load(Layout.of(nn.Linear(2, 2)))
    assert Checkpoints(tmp_path / "none", "a").load(LAYOUT) is None


def test_log_lines_of_rounds_that_run_again_are_dropped(tmp_path):
    checkpoints = Checkpoints(tmp_path, "f")
    assert checkpoints.lines(None, [{"round": 1}]) == [{"round": 1}]  # a new log begins with what came before
    for r in (2, 3):
        checkpoints.append({"round": r})
    checkpoints.save(3, (W,), (), Since(), nothing)
    checkpoints.append({"round": 4})
    with checkpoints.log.open("a") as file:
        file.write('{"round": 5, "te')  # cut short by a crash
    again = Checkpoints(tmp_path, "f")
    assert again.lines(again.load(LAYOUT), [{"round": 99}]) == [{"round": 1}, {"round": 2}, {"round": 3}]
    again.append({"round": 4})
    assert again.log.read_text() == '{"round": 1}\n{"round": 2}\n{"round": 3}\n{"round": 4}\n'
    again.save(4, (W,), (), Since(), nothing)
    assert Checkpoints(tmp_path, "f").load(LAYOUT).rounds == 4
