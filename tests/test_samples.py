"""Samples in files and Datasets, data of one's own by name in a config: on every engine the same bits."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import own_data
from own_data import CLASSES, numbers
from qupel.data.clients import pool
from qupel.data.partition import by_owner
from qupel.data.samples import Items, Some
from qupel.data.sources import from_arrays, identity, load
from qupel.data.stored import Stored
from qupel.deploy import file
from qupel.engine import group as groups
from qupel.engine.fingerprint import of_job
from qupel.engine.rounds import run
from qupel.engine.workers import Pool, Workers
from qupel.flower.task import load_client
from qupel.run import config as configs
from qupel.run import experiment, jobs
from qupel.run.experiment import run_experiment
from qupel.util.errors import UserError
from test_ranks import on_ranks
from tiny import final_models, run_inline, same, timeless

CONFIG = """
rounds = 5
local_steps = 2
batch = 4
bits = [2, 32]
[data]
name = "own_data:on_dicts"
args = {clients = 3}
[model]
name = "own_data:Several"
[settings]
init = "quantile"
[methods.QuPeL]
recipe = "qupel"
"""


def parsed(*changes):
    return configs.parse(CONFIG, "c", changes)


def job_of(config):
    return jobs.build_job(config, experiment.cells(config)[0])


ON_TOKENS = ("data.name=own_data:on_tokens", "model.name=own_data:Embedded")


@pytest.mark.parametrize("changes", [(), ON_TOKENS])
def test_one_process_two_workers_and_two_ranks_give_the_same_bits(changes, two, workers, tmp_path):
    config = parsed(*changes)
    cell, job = experiment.cells(config)[0], job_of(config)
    assert job.names == ("user 0", "user 1", "user 2")
    expected, models = run_inline(job)
    engine = Workers(workers, job)
    finished = run(job, engine)
    on_two = on_ranks(two, config, cell, job, tmp_path)
    for found, shipped in ((finished, final_models(job, engine, finished.w)), on_two):
        assert same(shipped, models)
        assert same(found.w, expected.w)
        assert timeless(found.lines) == timeless(expected.lines)


@pytest.fixture(scope="module")
def two():
    """Ranks that find this folder's modules, as those of a run find what stands beside its config."""
    known = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{known}{os.pathsep}{Path(__file__).parent}".lstrip(os.pathsep))
        with groups.start(2) as group:
            yield group


@pytest.fixture(scope="module")
def workers():
    with Pool(2) as started:
        yield started


# --- arrays in files ---


@pytest.fixture
def stored(tmp_path):
    """(file, what is in it)"""
    values = numbers(0, 30, (3, 2))
    np.save(tmp_path / "x.npy", values)
    return tmp_path / "x.npy", values


def mapped(path):
    return np.load(path, mmap_mode="r")


@pytest.mark.parametrize("cut", [slice(None), slice(4, 20), slice(1, None, 3), slice(None, None, -1), slice(7, 8)])
def test_rows_of_a_file_are_the_arrays(stored, cut):
    path, values = stored
    array = Stored.of(mapped(path)[cut], torch.float32, "x")
    assert array.shape == values[cut].shape
    for rows in ([0], [len(array) - 1, 0, 0], list(range(len(array)))):
        assert torch.equal(array.index_select(0, torch.tensor(rows)), torch.from_numpy(values[cut][rows]))
    assert torch.equal(array[0:2], torch.from_numpy(values[cut][0:2].copy()))


def test_a_map_that_begins_within_a_raw_file(tmp_path):
    values = np.arange(40, dtype=">i2").reshape(10, 4)
    (tmp_path / "raw").write_bytes(b"x" * 5001 + values.tobytes())
    array = np.memmap(tmp_path / "raw", ">i2", "r", offset=5001, shape=(10, 4))
    found = Stored.of(array[3:], torch.int64, "x")
    assert found.index_select(0, torch.tensor([6, 0])).tolist() == values[[9, 3]].tolist()


@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 5, 4, 3), (6, 3, 5, 4)])
def test_pictures_in_files_are_those_in_memory(shape, tmp_path):
    pictures = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    np.save(tmp_path / "p.npy", pictures)
    inside = from_arrays(pictures, [0] * 6, pictures, [0] * 6)
    outside = from_arrays(mapped(tmp_path / "p.npy"), [0] * 6, mapped(tmp_path / "p.npy"), [0] * 6)
    assert outside.train.kinds == inside.train.kinds
    assert (*outside.mean, *outside.std) == pytest.approx((*inside.mean, *inside.std))
    rows = np.array([4, 1])
    assert torch.equal(outside.train.read(rows).inputs, inside.train.read(rows).inputs)


def test_a_file_that_is_wrong(stored, tmp_path):
    path, values = stored
    array = Stored.of(mapped(path), torch.float32, "x")
    with pytest.raises(UserError, match="rows in C order are needed"):
        Stored.of(mapped(path).transpose(0, 2, 1), torch.float32, "x")
    bad = values.copy()
    bad[17, 1, 1] = np.nan
    np.save(tmp_path / "bad.npy", bad)
    with pytest.raises(UserError, match=r"bad.npy row 17: NaN or infinite"):
        Stored.of(mapped(tmp_path / "bad.npy"), torch.float32, "x")[10:20]
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match="ends before row 20; it was longer"):
        array.index_select(0, torch.tensor([20]))
    path.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        array.index_select(0, torch.tensor([0]))


def test_some_rows_of_what_is_not_in_memory_stay_there(stored):
    path, values = stored
    labels = np.arange(30) % CLASSES
    data = from_arrays(mapped(path), labels, mapped(path)[:4], labels[:4])
    some = data.train.take(np.array([3, 9, 4])).take(np.array([2, 0]))
    assert isinstance(some, Some)
    assert torch.equal(some.read(slice(0, 2)).inputs, torch.from_numpy(values[[4, 3]]))
    assert some.labels.tolist() == [4 % CLASSES, 0]
    assert len(some) == 2


def test_checksums_of_files_look_at_size_time_and_some_rows(stored, tmp_path):
    path, values = stored
    labels = np.arange(30) % CLASSES

    def mark():
        return identity(pool([(mapped(path), labels)]))

    before = mark()
    assert mark() == before
    np.save(path, np.where(np.arange(30)[:, None, None] == 29, 0, values))
    assert mark() != before
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    np.save(path, values)
    after = mark()
    shutil.copy2(path, moved)  # with its time
    path = moved / path.name
    assert mark() == after


def test_a_fingerprint_tells_data_in_files_and_datasets_apart(stored):
    path, values = stored
    flat = values.reshape(30, 6)
    labels = np.arange(30) % CLASSES
    job = job_of(parsed("data.name=own_data:arrays", "data.args={}", "model.name=mlp", "split.kind=one"))

    def of(clients):
        data = pool(clients)
        return of_job(replace(job, data=data, parts=by_owner(data), plans=job.plans[:1], names=()))

    other = flat.copy()
    other[29] = 0
    marks = [of([(own_data.Rows(x, labels),)]) for x in (flat, flat, other)]
    assert marks[0] == marks[1] != marks[2]
    first = of([(mapped(path), labels)])
    assert first == of([(mapped(path), labels)])
    assert first != of([(mapped(path)[::-1], labels)])


# --- Datasets ---


def test_items_are_made_tensors_of_their_kind():
    def convert(row):
        return {"ids": [row, row + 1], "side": float(row)}, [[row % 2]], 0.5

    items = Items(range(9), "rows", convert)
    batch = items.read(np.array([5, 2]))
    assert batch.inputs["ids"].tolist() == [[5, 6], [2, 3]]
    assert batch.inputs["side"].dtype == torch.float32
    assert (batch.targets.tolist(), batch.given[0].tolist()) == ([[[1]], [[0]]], [0.5, 0.5])
    assert items.labels is None
    with pytest.raises(UserError, match=r"rows: rows 0, ... differ in shape; make them alike"):
        Items(range(3), "rows", lambda row: ([0.0] * (row + 1), 0)).read(slice(0, 3))
    with pytest.raises(UserError, match="rows: some rows have a weight, others none"):
        Items(range(3), "rows", lambda row: (1.0, 0, 2.0)[: 2 + row % 2]).read(slice(0, 3))
    with pytest.raises(UserError, match="rows, row 0: inputs is of type <U1; allowed are real numbers"):
        Items(range(3), "rows", lambda row: ("a", 0)).read(slice(0, 1))


def test_labels_of_a_dataset_that_has_them():
    class Labelled(own_data.Rows):
        targets = (0, 2, 1, 1)

    data = pool([(Labelled(numbers(0, 4), [0, 2, 1, 1]),)])
    assert data.train.labels.tolist() == [0, 2, 1, 1]
    assert data.classes == 3
    assert pool([(own_data.Rows(numbers(0, 4), [0, 2, 1, 1]),)]).classes is None


# --- by name ---


def test_what_a_function_may_return():
    arrays = load("own_data:arrays")
    assert (arrays.owners, len(arrays.train), arrays.classes) == ((), 40, CLASSES)
    clients = load("own_data:on_tokens", args={"clients": 2}, limit=3)
    assert clients.owners == ("user 0", "user 1")
    assert [len(part.train_rows) for part in by_owner(clients)] == [3, 3]
    assert load("own_data:on_dicts", args={"clients": 2}).shape == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.name=no_such:load"], "no module 'no_such' on the Python path or beside the config"),
        (["data.name=own_data:absent"], "own_data has no 'absent'"),
        (
            ["data.args={persons = 3}"],
            r"cannot be called with args = {'persons': 3}: .*persons",
        ),
        (["data.name=own_data:nothing", "data.args={}"], "data 'own_data:nothing': returns int; allowed are a list"),
        (["data.name=own_data:broken", "data.args={}"], "data 'own_data:broken' raises OSError: no such sensor$"),
        (["data.name=digits"], "data.args.clients: unknown setting of digits; it has none"),
        (["data.name=nowhere/", "data.args={}"], "data folder nowhere/ does not exist"),
        (
            ["data.name=nowhere", "data.args={}"],
            r"unknown data set 'nowhere'; known are .*FOLDER/, or",
        ),
        (["data.standardize=shared"], "standardize: for one input of floats"),
        (["task.loss=own_data:per_sample"], r"the loss returns a tensor of shape \(4,\); needed is one number"),
        ([*ON_TOKENS, "data.args={top = 40}"], "token 3.*is not in layer 'table', which has a vocabulary of 11"),
    ],
)
def test_bad_data_in_a_config(changes, message):
    with pytest.raises(UserError, match=message):
        job_of(parsed(*changes))


def test_clients_may_be_dealt_out_anew():
    kinds = {kind: len(job_of(parsed(*ON_TOKENS, f"split.kind={kind}", "split.clients=2")).parts)
             for kind in ("classes", "groups", "iid", "dirichlet", "one")}  # fmt: skip
    assert kinds == {"classes": 3, "groups": 3, "iid": 2, "dirichlet": 2, "one": 1}


def per_client(folder: Path):
    """Three clients in files: two of numpy's, one of Parquet; the last has no test data."""
    folder.mkdir()
    x, y = numbers(0, 12), np.arange(12) % CLASSES
    np.savez(folder / "ada.npz", train_inputs=x[:8], train_targets=y[:8], test_inputs=x[8:], test_targets=y[8:])
    split = ["train"] * 8 + ["test"] * 4
    columns = {"inputs": list(x), "target": y, "split": split}
    pq.write_table(pa.table(columns), folder / "bob.parquet")
    features = {f"f{k}": x[:, k] for k in range(4)}
    pq.write_table(pa.table({**features, "label": y}), folder / "eve.parquet")
    return x, y


def test_a_folder_of_files(tmp_path):
    x, y = per_client(tmp_path / "people")
    data = load(f"{tmp_path}/people/")
    assert (data.name, data.owners) == ("people", ("ada", "bob", "eve"))
    ada, bob, eve = by_owner(data)
    for part in (ada, bob):
        assert torch.equal(part.train(data).inputs, torch.from_numpy(x[:8]))
        assert part.test(data).targets.tolist() == y[8:].tolist()
    assert torch.equal(eve.train(data).inputs, torch.from_numpy(x))
    assert len(eve.test_rows) == 0


def test_a_folder_runs_and_its_files_carry_each_clients_scale(tmp_path):
    x, _ = per_client(tmp_path / "people")
    changes = ("data.args={}", "model.name=mlp", "data.standardize=client", "rounds=5", "bits=auto", "budget=64 KiB")
    config = parsed(f"data.name={tmp_path}/people/", *changes)
    (result,) = run_experiment(config, tmp_path / "r")
    assert len(result["files"]) == 3
    abouts = [file.load(path).about for path in sorted((tmp_path / "r").glob("cells/*/models/*"))]
    assert [about.client for about in abouts] == ["ada", "bob", "eve"]
    for about, own in zip(abouts, (x[:8], x[:8], x), strict=True):
        assert about.mean == pytest.approx(own.astype(float).mean(0), abs=1e-6)
        assert about.std == pytest.approx(own.astype(float).std(0), rel=1e-5)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": [1.0]}, "needed are the column `target`"),
        ({"inputs": [[1.0, 2.0], [1.0]], "target": [0, 1]}, "column 'inputs': lists of different lengths"),
        ({"inputs": [1.0, None], "target": [0, 1]}, "column 'inputs' has 1 empty cells"),
        ({"inputs": ["a"], "target": [0]}, "column 'inputs' is of type string"),
        ({"inputs": [1.0], "target": [0], "split": ["valid"]}, "split 'valid'; allowed are train and test"),
    ],
)
def test_bad_files_in_a_folder(columns, message, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=message):
        load(f"{tmp_path}/")


def test_other_bad_folders(tmp_path):
    with pytest.raises(UserError, match=r"no .npz and no .parquet file, one for each client"):
        load(f"{tmp_path}/")
    np.savez(tmp_path / "a.npz", inputs=np.zeros(3))
    with pytest.raises(UserError, match=r"a.npz: holds inputs; needed are train_inputs and train_targets"):
        load(f"{tmp_path}/")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="two files of client 'a'"):
        load(f"{tmp_path}/")
    (tmp_path / "a.npz").unlink()
    with pytest.raises(UserError, match="not a readable Parquet file"):
        load(f"{tmp_path}/")


# --- Flower ---


def test_a_flower_client_has_data_of_its_own(tmp_path):
    path = tmp_path / "client.toml"
    data = '[data]\nname = "own_data:on_tokens"\nargs = {clients = 1}\n'
    path.write_text(f'client = 0\nbits = 2\n{data}standardize = "client"\n')
    own = load_client(path).data
    assert (own.args, own.standardize) == ({"clients": 1}, "client")
    path.write_text(f'client = 0\nbits = 2\n{data}standardize = "shared"\n')
    with pytest.raises(UserError, match=r"data.standardize: .*'off' or 'client'"):
        load_client(path)


def test_older_runs_know_nothing_of_new_settings(tmp_path):
    """A run whose config has no args and no standardize goes on."""
    from qupel.util.files import read_json, write_sealed

    config = parsed("data.name=own_data:arrays", "data.args={}", "model.name=mlp", "split.clients=3", "split.classes=2")
    run_experiment(config, tmp_path / "r")
    before = read_json(tmp_path / "r" / "config.json")
    before["data"] = {k: v for k, v in before["data"].items() if k not in ("args", "standardize")}
    write_sealed(tmp_path / "r" / "config.json", before)
    run_experiment(config, tmp_path / "r", resume=True)
