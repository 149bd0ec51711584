"""Clients as they come: any kind of inputs and targets, on every engine the same; what is wrong is said in one line."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import own_data
import qupel
from own_data import CLASSES, VOCABULARY, Embedded, Rows, Several, numbers, on_dicts, on_tokens, seeded
from qupel.data.clients import pool
from qupel.data.partition import by_owner
from qupel.data.samples import Arrays
from qupel.data.samples import Pool as Pooled
from qupel.data.sources import identity
from qupel.deploy.file import load
from qupel.deploy.predict import Model, accuracy
from qupel.deploy.timing import Stretch
from qupel.engine.workers import Pool
from qupel.run import api
from qupel.tasks.losses import losses, with_weights
from qupel.util.errors import UserError

QUICK = {"rounds": 3, "local_steps": 2, "batch": 4, "settings": qupel.Settings(warmup=0.3, finetune=0.3)}


def mlp(inputs=4):
    def make():
        return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    return seeded(make)


@pytest.fixture(scope="module")
def crew():
    """Two workers, started once; a fit that asks for workers gets these."""
    with Pool(2) as started, pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "Pool", lambda size: nullcontext(started))
        yield started


def fit(net, clients, **options):
    return qupel.fit(net, clients, **{**QUICK, **options})


def weights(found):
    return [torch.cat([p.flatten() for p in model.parameters()]) for model in (*found.models, found.global_model)]


def same(one, other):
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
    assert one.test == other.test


def people(sizes=(8, 8, 8), classes=CLASSES):
    return [(numbers(i, n), np.arange(n) % classes, numbers(50 + i, 5), np.arange(5) % classes)
            for i, n in enumerate(sizes)]  # fmt: skip


# --- pooling ---


def test_pooled_clients_are_their_rows():
    data = pool({"a": people()[0], "b": people()[1][:2], "c": qupel.Client(*people()[2], name="her own name")})
    assert data.owners == ("a", "b", "her own name")
    parts = by_owner(data)
    assert [len(part.train_rows) for part in parts] == [8, 8, 8]
    assert [len(part.test_rows) for part in parts] == [5, 0, 5]
    for part, one in zip(parts, people(), strict=True):
        assert torch.equal(part.train(data).inputs, torch.from_numpy(one[0]))
    assert torch.equal(parts[2].test(data).inputs, torch.from_numpy(people()[2][2]))


def test_without_any_test_data():
    data = pool([one[:2] for one in people()])
    assert [len(part.test_rows) for part in by_owner(data)] == [0, 0, 0]
    found = fit(mlp(), [one[:2] for one in people()])
    assert len(found.models) == 3
    assert all(score is None or np.isnan(score) for score in found.test)


def test_one_sample_and_a_class_that_nobody_else_has():
    lonely = (numbers(9, 1), np.array([2]), numbers(8, 2), np.array([2, 2]))
    clients = [*people(classes=2), lonely]
    assert pool(clients).classes == 3
    assert len(fit(mlp(), clients).models) == 4


def test_in_memory_stays_one_tensor_and_the_rest_where_it_is(tmp_path):
    assert isinstance(pool(people()).train, Arrays)
    x = numbers(0, 8)
    np.save(tmp_path / "x.npy", x)
    mixed = pool([people()[0], (np.load(tmp_path / "x.npy", mmap_mode="r"), np.arange(8) % CLASSES)])
    assert isinstance(mixed.train, Pooled)
    rows = np.array([9, 0, 15, 3])
    read = mixed.train.read(rows)
    assert torch.equal(read.inputs, torch.from_numpy(np.concatenate([people()[0][0], x])[rows]))
    assert torch.equal(read.targets, torch.from_numpy(np.concatenate([np.arange(8) % CLASSES] * 2)[rows]))


# --- the same bits from whatever holds the samples ---


def test_a_dataset_a_memory_map_and_an_array_train_alike(tmp_path, crew):
    expected = fit(mlp(), people())
    sets = [(Rows(a, b), Rows(c, d)) for a, b, c, d in people()]
    same(fit(mlp(), sets), expected)
    tuples = [tuple(torch.from_numpy(part) for part in one) for one in people()]
    same(
        fit(mlp(), [tuple(torch.utils.data.TensorDataset(*one[k : k + 2]) for k in (0, 2)) for one in tuples]), expected
    )
    files = []
    for i, one in enumerate(people()):
        for k, part in enumerate(one):
            np.save(tmp_path / f"{i}-{k}.npy", part)
        files.append([np.load(tmp_path / f"{i}-{k}.npy", mmap_mode="r") for k in range(4)])
    same(fit(mlp(), files), expected)
    same(fit(mlp(), files, workers=2), expected)
    same(fit(mlp(), sets, workers=2), expected)


def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    clients = []
    for a, b, c, d in people():
        sets = [datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}) for x, y in ((a, b), (c, d))]
        clients.append(qupel.Client(sets[0], test=sets[1], convert=own_data.by_name))
    same(fit(mlp(), clients), fit(mlp(), people()))
    with pytest.raises(UserError, match=r"client 0: train, row 0: the Dataset gives a dict; needed is .*convert="):
        fit(mlp(), [qupel.Client(one.train) for one in clients])


@pytest.mark.parametrize(("make", "clients"), [(Several, on_dicts), (Embedded, on_tokens)])
def test_dicts_and_tokens_on_workers_and_in_stacks(make, clients, crew):
    expected = fit(seeded(make), clients())
    same(fit(seeded(make), clients(), workers=2), expected)
    stacked = fit(seeded(make), clients(), vectorize="on")
    for one, other in zip(weights(stacked), weights(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_tuple_of_inputs_is_several_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.mid, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

        def forward(self, a, b):
            return self.out(torch.relu(self.mid(torch.relu(self.left(a) + self.left(b)))))

    whole = people()
    twice = [((a, a), b, (c, c), d) for a, b, c, d in whole]
    found = fit(seeded(Two), twice)
    assert found.about.input_shape == ()
    assert all(0 <= score <= 1 for score in found.test)


# --- kinds ---


def test_integers_stay_integers_and_2d_targets_what_they_are():
    data = pool([(own_data.tokens(0, 6), own_data.tokens(1, 6))])
    assert data.train.kinds == ((torch.int64, (5,)), (torch.int64, (5,)))
    assert pool([(own_data.tokens(0, 6).astype(np.int16), numbers(0, 6))]).train.kinds[1] == (torch.float32, (4,))
    images = np.zeros((3, 8, 8), np.uint8)
    assert pool([(images, [0, 1, 2])]).train.kinds[0] == (torch.uint8, (1, 8, 8))


def test_a_language_model_learns_whole_sequences():
    """Targets (n, 5) of tokens: cross entropy of every place."""

    class Next(Embedded):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(8, VOCABULARY)

        def forward(self, ids):
            return self.out(torch.relu(self.hidden(self.table(ids)))).movedim(-1, 1)  # (n, vocabulary, 5)

    clients = [(x := own_data.tokens(i, 8), (x + 1) % VOCABULARY, x, (x + 1) % VOCABULARY) for i in range(2)]
    found = fit(seeded(Next), clients, method="fedavg", rounds=30, settings=qupel.Settings(eta1=1.0))
    assert max(found.test) < 0.5 * np.log(VOCABULARY)


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "bce"])
def test_losses_of_numbers_take_whole_numbers(name):
    outputs, targets = torch.randn(4, 3), torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    assert torch.equal(losses[name](outputs, targets), losses[name](outputs, targets.float()))


# --- weights ---


@pytest.mark.parametrize("name", list(losses))
def test_weighted_losses_equal_a_loop(name):
    torch.manual_seed(0)
    outputs = torch.randn(5, 3, dtype=torch.float64)
    targets = torch.randint(0, 3, (5,)) if name == "cross_entropy" else torch.rand(5, 3, dtype=torch.float64)
    counts = torch.tensor([0.0, 1, 2, 0.5, 3], dtype=torch.float64)
    each = torch.stack([losses[name](outputs[i : i + 1], targets[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(with_weights(losses[name])(outputs, targets, counts), (each * counts).mean())
    plain = losses[name](outputs, targets)
    torch.testing.assert_close(with_weights(losses[name])(outputs, targets, torch.ones(5).double()), plain)


def test_samples_of_weight_0_are_as_if_their_labels_were_others():
    """And weights of 1 change nothing; where one client has weights, the others' are 1."""
    counts = np.array([1.0, 0, 1, 1, 0, 1, 1, 1])

    def with_labels(wrong):
        made = []
        for a, b, c, d in people():
            labels = np.where(counts == 0, wrong, b)
            made.append(qupel.Client(a, labels, c, d, weights=counts))
        return made

    same(fit(mlp(), with_labels(0)), fit(mlp(), with_labels(1)))
    ones = [qupel.Client(*people()[0], weights=np.ones(8)), *people()[1:]]
    for a, b in zip(weights(fit(mlp(), ones)), weights(fit(mlp(), people())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_weights_reach_a_loss_of_ones_own_on_workers_and_from_a_dataset(crew):
    clients = [qupel.Client(*one, weights=np.linspace(0, 2, 8)) for one in people()]
    expected = fit(mlp(), clients)
    same(fit(mlp(), clients, loss=F.cross_entropy, workers=2), expected)

    class Weighted(Rows):
        def __getitem__(self, row):
            return *super().__getitem__(row), np.linspace(0, 2, 8)[row]

    sets = [qupel.Client(Weighted(a, b), test=torch.utils.data.Subset(Weighted(c, d), range(5)))
            for a, b, c, d in people()]  # fmt: skip
    trained = fit(mlp(), sets)
    for a, b in zip(weights(trained), weights(expected), strict=True):
        assert torch.equal(a, b)


def test_a_loss_without_a_third_argument_is_refused():
    clients = [qupel.Client(*one, weights=np.ones(8)) for one in people()]
    with pytest.raises(UserError, match=r"samples have weights, but the loss plain takes .outputs, targets. only"):
        fit(mlp(), clients, loss=own_data.plain)
    with pytest.raises(UserError, match=r"client 0: train weights row 2: -1.0; allowed are numbers from 0"):
        fit(mlp(), [qupel.Client(*people()[0], weights=[1, 1, -1, 1, 1, 1, 1, 1])])
    with pytest.raises(UserError, match=r"client 0: train weights: shape \(2,\); needed is one number for each of 8"):
        fit(mlp(), [qupel.Client(*people()[0], weights=[1, 1])])


# --- standardization ---


def shifted():
    """Every client measures in units of its own."""
    return [(a * 10.0**i + 5 * i, b, c * 10.0**i + 5 * i, d) for i, (a, b, c, d) in enumerate(people())]


def test_each_client_by_its_own_data():
    """The units of a client are gone: the same models as of data that were standardized before."""

    def by_hand(one):
        a, b, c, d = one
        mean, std = a.astype(float).mean(0), a.astype(float).std(0)
        return (a - mean) / std, b, (c - mean) / std, d

    found = fit(mlp(), shifted(), standardize="client")
    for a, b in zip(weights(found), weights(fit(mlp(), [by_hand(one) for one in shifted()])), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        found.transforms[2].mean.double(), torch.from_numpy(shifted()[2][0].astype(float).mean(0))
    )


@pytest.mark.parametrize("how", ["client", "shared"])
def test_files_reproduce_the_reported_score(how, tmp_path):

    found = fit(mlp(), shifted(), standardize=how, rounds=6)
    paths = found.save(tmp_path)
    for i, path in enumerate(paths):
        about = load(path).about
        net = qupel.load(path, mlp())

        def run(x, net=net):
            with torch.inference_mode():
                return net(torch.from_numpy(x)).numpy()

        model = Model(about, "packed", 0, run, lambda: (0, 0), lambda batch, seconds: Stretch(0.0, None))
        _, _, c, d = shifted()[i]
        assert accuracy(model, torch.from_numpy(c), torch.from_numpy(d)) == pytest.approx(found.test[i])
        assert about.extra["standardize"] == how
    means = {load(path).about.mean for path in paths}
    assert len(means) == (3 if how == "client" else 1)


def test_tokens_and_several_inputs_are_not_standardized():
    for clients, net in ((on_tokens(), Embedded), (on_dicts(), Several)):
        with pytest.raises(UserError, match="standardize: for one input of floats"):
            fit(seeded(net), clients, standardize="client")


# --- what is wrong ---


def test_inputs_of_different_shapes():
    odd = [people()[0], (numbers(1, 8, (5,)), np.zeros(8, int))]
    with pytest.raises(UserError, match=r"client 1: inputs float32 \(5,\), client 0 has float32 \(4,\); all clients'"):
        fit(mlp(), odd)
    with pytest.raises(UserError, match=r"client 0's test data: inputs float32 \(5,\), client 0's training data has"):
        fit(mlp(), [(*people()[0][:2], numbers(1, 5, (5,)), np.zeros(5, int))])
    with pytest.raises(UserError, match=r"client 1: targets float32 .*, client 0 has int64"):
        fit(mlp(), [people()[0], (numbers(1, 8), np.zeros(8))])
    with pytest.raises(UserError, match="client 0: train inputs: 8 and 7 rows; all must have one for each sample"):
        fit(mlp(), [({"a": numbers(0, 8), "b": numbers(0, 7)}, np.zeros(8, int))])


def test_a_dataset_that_raises_names_client_and_row():
    clients = [(Rows(*people((20,))[0][:2]),), (Rows(*people((20,))[0][:2], bad=17),)]
    with pytest.raises(UserError, match="client 1: train, row 17: the Dataset raises OSError: the disk is gone"):
        fit(mlp(), clients, batch=20)


@pytest.mark.slow
def test_a_worker_that_meets_a_bad_row_names_it():
    clients = [(Rows(*people((20,))[0][:2]),), (Rows(*people((20,))[0][:2], bad=17),)]
    with pytest.raises(UserError, match="client 1: train, row 17: the Dataset raises OSError: the disk is gone"):
        fit(mlp(), clients, batch=20, workers=2)


def test_a_dataset_that_breaks_later_loses_nothing(tmp_path):
    """What was trained until then is kept, and gone on with."""
    a, b, c, d = people((20,))[0]
    good, bad = Rows(a, b), Rows(a, b)
    options = {"batch": 2, "local_steps": 1, "rounds": 24, "evaluate_every": 2, "method": "fedavg", "out": tmp_path}

    def stop(progress):
        if progress.line and progress.line["round"] == 4:
            bad.bad = 17

    with pytest.raises(UserError, match="row 17"):
        fit(mlp(), [(bad, Rows(c, d))], watch=stop, **options)
    assert list(tmp_path.glob("cells/*/checkpoints/round-*"))
    resumed = fit(mlp(), [(good, Rows(c, d))], **options)
    same(resumed, fit(mlp(), [(good, Rows(c, d))], **{**options, "out": None}))


def test_a_token_beyond_the_vocabulary():
    clients = on_tokens()
    clients["user 2"][0][3, 1] = VOCABULARY + 4
    say = (
        f"user 2: token {VOCABULARY + 4}, its largest, is not in layer 'table', which has a vocabulary of {VOCABULARY}"
    )
    with pytest.raises(UserError, match=say):
        fit(seeded(Embedded), clients)
    sets = {name: (Rows(a, b), Rows(c, d)) for name, (a, b, c, d) in clients.items()}
    with pytest.raises(UserError, match=say):  # found when the row is read
        fit(seeded(Embedded), sets, batch=20)
    tested = on_tokens()
    tested["user 1"][2][0, 0] = 99
    with pytest.raises(UserError, match="user 1: token 99, its largest, is not in layer 'table'"):
        fit(seeded(Embedded), tested)
    late = {name: (Rows(a, b), Rows(c, d)) for name, (a, b, c, d) in tested.items()}
    with pytest.raises(UserError, match="user 1: token 99"):
        fit(seeded(Embedded), late)


def test_a_loss_that_is_no_number():
    with pytest.raises(UserError, match=r"the loss returns a tensor of shape \(4,\); needed is one number"):
        fit(mlp(), people(), loss=own_data.per_sample)
    with pytest.raises(UserError, match="the loss returns a float; needed is one number"):
        fit(mlp(), people(), loss=lambda outputs, targets: 0.5)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "clients: at least one is needed"),
        ([5], "client 0: a int; allowed are a Client, or a tuple"),
        ([(1, 2, 3)], "client 0: 3 arrays; allowed are"),
        ([qupel.Client(numbers(0, 4))], "client 0: train: inputs without targets"),
        ([qupel.Client(Rows([], []))], "client 0: train: the Dataset is empty"),
        ([qupel.Client(Rows(numbers(0, 4), [0] * 4), [0] * 4)], "client 0: train: a Dataset gives inputs, targets"),
        ([qupel.Client(numbers(0, 4), [0] * 4, None, [0])], "client 0: test targets without test inputs"),
        ([qupel.Client({1: numbers(0, 4)}, [0] * 4)], "client 0: train inputs: a dict of arrays by their names"),
        ([(own_data.tokens(0, 4), [0, 1, 2, 0])], "whole numbers are taken for tokens: for numbers give floats"),
    ],
)
def test_bad_clients(clients, message):
    with pytest.raises(UserError, match=message):
        fit(mlp(5), clients)


def test_identity_tells_dicts_apart():
    one, other = on_dicts(), on_dicts()
    assert identity(pool(one)) == identity(pool(other))
    other[0].train["mask"][0, 0] ^= True
    assert identity(pool(one)) != identity(pool(other))
