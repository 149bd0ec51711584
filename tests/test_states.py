"""Checkpoints that share clients' rows: each holds what was there when it was made, and writes only what changed."""

import random
import shutil

import pytest

from qupel.core.layout import Layout
from qupel.engine.checkpoint import Checkpoints, Since
from qupel.engine.inline import Inline
from qupel.engine.rounds import Stopped, run
from qupel.engine.states import FOLDER, PART
from qupel.engine.store import DiskStore, MemoryStore
from qupel.util.errors import UserError
from qupel.util.files import Damaged, write_sealed
from test_store import FORMS, LAYOUT, W, random_state
from tiny import final_models, make_job, recipe, run_inline, same, saved_rows, timeless

N = 200
ROW = 4 * (LAYOUT.size + 4)  # x and four centers
NOTHING = 3000  # bytes that a checkpoint has beside rows and their listing: w, meta.json, the files it counts


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    return MemoryStore(FORMS) if request.param == "memory" else DiskStore(FORMS, tmp_path)


def put(store, clients, seed):
    for client in clients:
        store.put(client, 0, random_state(N * seed + client, memory=0))


def saved(checkpoints, store, rounds):
    """Make a checkpoint; the bytes that it wrote."""
    files = checkpoints.folder / FOLDER
    before = {p.name: p.stat().st_size for p in files.iterdir()} if files.exists() else {}
    written = 0

    def save(folder):
        nonlocal written
        store.save(folder, "shard-0")
        written += sum(p.stat().st_size - before.get(p.name, 0) for p in files.iterdir())

    checkpoints.save(rounds, (W,), (), Since(), save)
    own = checkpoints.folder / f"round-{rounds:06d}"
    return written + sum(p.stat().st_size for p in own.iterdir())


def test_a_checkpoint_writes_what_changed(store, tmp_path):
    """After k of 200 clients took part: their rows, at most as many others, and listings; the files together stay
    within a small multiple of what lives."""
    rng = random.Random(0)
    checkpoints = Checkpoints(tmp_path, "f")
    put(store, range(N), 0)
    assert saved(checkpoints, store, 1) > N * ROW
    assert saved(checkpoints, store, 2) < NOTHING  # nobody took part
    for rounds in range(3, 120):
        k = rng.randint(1, 8)
        put(store, rng.sample(range(N), k), rounds)
        written = saved(checkpoints, store, rounds)
        assert k * ROW < written < 2 * k * (ROW + 60) + NOTHING
        files = [p.stat().st_size for p in (checkpoints.folder / FOLDER).iterdir()]
        assert sum(files) < 3 * N * ROW
        assert len(files) < 6 * PART
    assert saved(checkpoints, store, 200) < NOTHING


def test_every_checkpoint_holds_what_was_there(store, tmp_path):
    """Against a plain copy of all rows, over changes, checkpoints, and going back to an older one."""
    rng = random.Random(1)
    checkpoints = Checkpoints(tmp_path, "f")
    held, expected = {}, {}  # client -> seed of its state; rounds -> the same as it was then
    for rounds in range(1, 60):
        some = rng.sample(range(N // 4), rng.choice([0, 1, 5, N // 4]))
        put(store, some, rounds)
        held |= dict.fromkeys(some, rounds)
        saved(checkpoints, store, rounds)
        expected[rounds] = dict(held)
        kept = sorted(checkpoints.folder.glob("round-*"))
        for folder in kept:
            seeds = expected[int(folder.name[-6:])]
            rows = {c: random_state(N * seed + c, memory=0) for c, seed in sorted(seeds.items())}
            found = saved_rows(folder)
            assert list(found) == list(rows)
            for client, state in rows.items():
                assert found[client][: 4 * LAYOUT.size] == state.x.numpy().tobytes()
        if rounds % 7 == 0:  # as the guard does: this checkpoint and the one before are taken back
            checkpoints.forget(rounds - 2)
            folder = checkpoints.load(LAYOUT).states
            store.load(folder, range(N))
            held = dict(expected[rounds - 2])
        for client in range(0, N // 4, 3):
            found = store.get(client, W)
            assert (found is None) == (client not in held)
            if found:
                assert same([found[1].x], [random_state(N * held[client] + client, memory=0).x])


@pytest.mark.parametrize("how", ["memory", "disk"])
def test_a_run_of_few_a_round_that_is_stopped_goes_on_to_the_same_bits(tmp_path, how):
    """Its checkpoints share rows; each stop begins with a new process's memory: nothing but the files."""
    job = make_job(recipe(0, 14, 2), sizes=(12,) * 10, sample=0.2, checkpoint_every=1)
    whole, models = run_inline(job)
    for stop in (3, 4, 9, 99):
        rounds = []
        with Inline(job, store=how, scratch=tmp_path) as engine:
            try:
                finished = run(job, engine, checkpoints=Checkpoints(tmp_path, "f"),
                               watch=lambda p, seen=rounds: seen.append(p.round),
                               should_stop=lambda seen=rounds, stop=stop: len(seen) == stop - 1)  # fmt: skip
                others = final_models(job, engine, finished.w)
            except Stopped:
                assert stop < 99
    assert same(finished.w, whole.w)
    assert same(models, others)
    assert timeless(finished.lines) == timeless(whole.lines)


# --- damage ---


@pytest.fixture
def three(tmp_path):
    """Checkpoints of rounds 1 to 3: one file each; clients 0 to 9 in the first, 0 in the second, 1 in the third."""
    store, checkpoints = MemoryStore(FORMS), Checkpoints(tmp_path, "f")
    for rounds, clients in ((1, range(10)), (2, [0]), (3, [1])):
        put(store, clients, rounds)
        saved(checkpoints, store, rounds)
    return checkpoints, sorted((checkpoints.folder / FOLDER).iterdir())


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [10, ROW + 5])  # a row, its listing
@pytest.mark.parametrize(("file", "sound"), [(2, 2), (1, 1)])
def test_damage_that_an_older_checkpoint_does_not_have_is_found_at_once(three, capsys, file, sound, at):
    checkpoints, files = three
    flip(files[file], at)
    assert checkpoints.load(LAYOUT).rounds == sound
    assert f"{files[file]} is damaged: the checksum of" in capsys.readouterr().err
    assert len(saved_rows(checkpoints.newest())) == 10


def test_damage_that_all_have_is_found_when_it_is_read(three):
    checkpoints, files = three
    flip(files[0], 5 * ROW + 10)
    store = MemoryStore(FORMS)
    store.load(checkpoints.load(LAYOUT).states, range(10))
    assert store.get(4, W)
    with pytest.raises(Damaged, match=rf"{files[0]} is damaged: the checksum of client 5 is wrong"):
        store.get(5, W)


def test_a_listing_that_all_have(three):
    checkpoints, files = three
    flip(files[0], 10 * ROW + 5)
    with pytest.raises(Damaged, match="checksum of a listing is wrong; no older checkpoint is sound: remove"):
        checkpoints.load(LAYOUT)


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_file_that_is_cut_short_or_gone(three, capsys, how):
    checkpoints, files = three
    if how == "cut":
        files[2].write_bytes(files[2].read_bytes()[:-1])
    else:
        files[2].unlink()
    assert checkpoints.load(LAYOUT).rounds == 2
    assert ("cut short" if how == "cut" else "is missing") in capsys.readouterr().err


def test_what_a_killed_process_appended_does_not_count(three):
    checkpoints, files = three
    for file in files:
        with file.open("ab") as more:
            more.write(b"half a row")
    assert checkpoints.load(LAYOUT).rounds == 3
    assert len(saved_rows(checkpoints.newest())) == 10


def test_a_checkpoint_that_failed_leaves_nothing_that_counts(tmp_path):
    """The disk is full in the middle of a batch that grows a file; then there is room, and all rows are there."""
    store, checkpoints = DiskStore(FORMS, tmp_path), Checkpoints(tmp_path, "f")
    put(store, range(N), 1)
    saved(checkpoints, store, 1)
    for rounds in (2, 3):
        put(store, [rounds], rounds)
        saved(checkpoints, store, rounds)
    before = saved_rows(checkpoints.newest())
    put(store, [5, 6], 9)
    rows = store._own

    def full(client):
        if client == 6:
            raise OSError(28, "No space left on device")
        return rows(client)

    store._own = full
    with pytest.raises(OSError, match="No space"):
        saved(checkpoints, store, 4)
    assert saved_rows(checkpoints.newest()) == before
    store._own = rows
    saved(checkpoints, store, 5)
    after = saved_rows(checkpoints.newest())
    assert {c for c in range(N) if after[c] != before[c]} == {5, 6}


def test_states_of_another_folder_are_taken_over(three, tmp_path):
    """A run that begins with another's states has them itself from its first checkpoint on."""
    checkpoints, _ = three
    store, own = MemoryStore(FORMS), Checkpoints(tmp_path / "own", "f")
    store.load(checkpoints.newest(), range(10))
    expected = saved_rows(checkpoints.newest())
    put(store, [3], 7)
    saved(own, store, 4)
    shutil.rmtree(checkpoints.folder)
    found = saved_rows(own.newest())
    assert {c: row for c, row in found.items() if c != 3} == {c: row for c, row in expected.items() if c != 3}
    assert found[3] != expected[3]


def test_an_older_versions_checkpoint_is_refused_in_a_line(tmp_path):
    checkpoints = Checkpoints(tmp_path, "f")
    listing = {"rows": {"0": {"offset": 0, "crc": 0, "phase": 0, "parts": {}, "layers": {}}}}
    checkpoints.save(1, (W,), (), Since(), lambda folder: write_sealed(folder / "shard-0.json", listing))
    with pytest.raises(UserError, match="older version, whose states of clients are not read; resume it with that"):
        checkpoints.load(Layout.of(make_job(recipe()).module))
