"""Partitions: the promises of each one for any sizes, and every impossible request."""

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from qupel.data import partition
from qupel.data.sources import load
from qupel.util.errors import UserError


def balanced(classes, each, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), each))


def disjoint(rows):
    flat = np.concatenate(rows)
    return len(np.unique(flat)) == len(flat)


def same(one, two):
    return all(
        np.array_equal(a.train_rows, b.train_rows) and np.array_equal(a.test_rows, b.test_rows)
        for a, b in zip(one, two, strict=True)
    )


def test_the_papers_split():
    train, test = balanced(10, 5000), balanced(10, 1000)
    parts = partition.by_class(torch.from_numpy(train), torch.from_numpy(test), 20, 4, seed=1)
    counts = partition.table(parts, train, 10)
    assert counts.shape == (20, 10)
    assert ((counts == 0) | (counts == 625)).all()
    assert (counts.sum(0) == 5000).all()
    assert (counts.sum(1) == 2500).all()
    test_counts = np.stack([np.bincount(test[part.test_rows], minlength=10) for part in parts])
    assert (test_counts * 5 == counts).all()
    assert disjoint([part.train_rows for part in parts])
    assert disjoint([part.test_rows for part in parts])


@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 12), st.integers(0, 3), st.data())
@settings(max_examples=150, deadline=None)
@example(10, 20, 4, 0, None)
def test_by_class_keeps_its_promises(classes, clients, k, seed, data):
    assume(k <= classes)
    most = -(-clients * k // classes)  # shards of the most used class
    if data is None:
        sizes, test_sizes = np.full(classes, 50), np.full(classes, 10)
    else:  # unequal classes
        sizes = np.array(data.draw(st.lists(st.integers(most, 3 * most), min_size=classes, max_size=classes)))
        test_sizes = np.array(data.draw(st.lists(st.integers(most, 2 * most), min_size=classes, max_size=classes)))
    train, test = np.repeat(np.arange(classes), sizes), np.repeat(np.arange(classes), test_sizes)
    parts = partition.by_class(train, test, clients, k, seed)
    counts = partition.table(parts, train, classes)
    test_counts = np.stack([np.bincount(test[part.test_rows], minlength=classes) for part in parts])
    assert len(parts) == clients
    assert ((counts > 0).sum(1) == k).all()  # k different classes
    assert len(np.unique(counts[counts > 0])) == 1  # equal shards
    assert len(np.unique(test_counts[test_counts > 0])) == 1
    assert ((counts > 0) == (test_counts > 0)).all()
    shards = (counts > 0).sum(0)
    assert shards.max() - shards.min() <= 1
    assert disjoint([part.train_rows for part in parts])
    assert disjoint([part.test_rows for part in parts])
    assert same(parts, partition.by_class(train, test, clients, k, seed))


def test_by_class_is_random_over_seeds_and_even_over_classes():
    train, test = balanced(10, 40), balanced(10, 8)
    draws = np.stack([partition.table(partition.by_class(train, test, 20, 4, s), train, 10) > 0 for s in range(200)])
    assert len({draw.tobytes() for draw in draws}) == 200
    often = draws.mean(0)  # (clients, classes): each client has each class in 4 of 10 draws
    assert abs(often - 0.4).max() < 5 * np.sqrt(0.4 * 0.6 / 200)
    together = np.einsum("sic,sid->cd", draws * 1.0, draws * 1.0) / 200 / 20
    pairs = together[~np.eye(10, dtype=bool)]  # under an even draw 4/10 * 3/9
    assert abs(pairs - 4 / 10 * 3 / 9).max() < 0.02


def test_by_class_of_given_sizes():
    train, test = balanced(10, 500), balanced(10, 100)
    parts = partition.by_class(train, test, 20, 4, 0, train_per_client=100, test_per_client=20)
    assert {(len(part.train_rows), len(part.test_rows)) for part in parts} == {(100, 20)}
    assert set(partition.table(parts, train, 10).ravel()) == {0, 25}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes_per_client": 11}, "classes_per_client 11: the training data has 10 classes"),
        ({"classes_per_client": 0}, "classes_per_client 0: at least 1"),
        ({"clients": 0}, "clients 0: at least 1"),
        ({"clients": 300}, "for 120 shards; take fewer clients"),
        ({"train_per_client": 202}, "train_per_client 202: allowed are multiples of 4"),
        ({"train_per_client": 0}, "train_per_client 0: allowed are multiples of 4"),
        ({"train_per_client": 400}, r"from 4 to 48, since class \d has 100 train samples for 8 shards"),
        ({"test_per_client": 44}, r"from 4 to 8, since class \d has 20 test samples for 8 shards"),
        ({"test_targets": np.zeros(100, int)}, "class 1 has 0 test samples for 8 shards"),
        ({"train_targets": np.zeros(100)}, "this split needs one whole number per sample"),
    ],
)
def test_by_class_refuses(change, message):
    asked = {"train_targets": balanced(10, 100), "test_targets": balanced(10, 20), "clients": 20}
    with pytest.raises(UserError, match=message):
        partition.by_class(**{**asked, "classes_per_client": 4, "seed": 0, **change})


@given(
    st.integers(1, 25),
    st.floats(1e-9, 1e9),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 60),
)
@settings(max_examples=150, deadline=None)
@example(25, 1e-9, 1, 4, 2, 0, 0)
def test_dirichlet_keeps_its_promises(clients, alpha, classes, min_train, min_test, seed, extra):
    rng = np.random.default_rng(seed)
    train = rng.integers(0, classes, clients * min_train + extra)
    test = rng.integers(0, classes, clients * min_test + extra)
    parts = partition.dirichlet(train, test, clients, alpha, seed, min_train, min_test)
    assert len(parts) == clients
    assert min(len(part.train_rows) for part in parts) >= min_train
    assert min(len(part.test_rows) for part in parts) >= min_test
    assert sorted(np.concatenate([part.train_rows for part in parts])) == list(range(len(train)))
    assert sorted(np.concatenate([part.test_rows for part in parts])) == list(range(len(test)))
    assert same(parts, partition.dirichlet(train, test, clients, alpha, seed, min_train, min_test))


def test_dirichlet_goes_from_one_class_to_iid_and_tests_what_it_trains():
    train, test = balanced(10, 1000), balanced(10, 200)

    def shares(alpha):
        parts = partition.dirichlet(train, test, 10, alpha, 0)
        counts = partition.table(parts, train, 10)
        test_counts = np.stack([np.bincount(test[part.test_rows], minlength=10) for part in parts])
        assert abs(test_counts - counts / 5).max() <= 1.5  # the same proportions, up to rounding and repair
        return counts / counts.sum(1, keepdims=True)

    assert shares(1e6).max() < 0.11
    assert shares(0.01).max(1).mean() > 0.5
    assert shares(0.1).max(1).mean() > shares(1).max(1).mean() > shares(10).max(1).mean()


@pytest.mark.parametrize("alpha", [0, -1, np.inf, np.nan])
def test_dirichlet_refuses_alpha(alpha):
    with pytest.raises(UserError, match=r"alpha .*: allowed are finite numbers above 0"):
        partition.dirichlet([0, 1], [0, 1], 2, alpha, 0)


def test_dirichlet_refuses_more_clients_than_samples():
    with pytest.raises(UserError, match="2 training samples for 3 clients with at least 1 each"):
        partition.dirichlet([0, 1], [0, 1, 1], 3, 1.0, 0)
    with pytest.raises(UserError, match="2 test samples for 3 clients with at least 1 each"):
        partition.dirichlet([0, 1, 1], [0, 1], 3, 1.0, 0)
    assert len(partition.dirichlet([0, 1, 1], [0, 1], 3, 1.0, 0, min_test=0)) == 3


@given(st.integers(1, 20), st.integers(0, 50), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_iid_covers_everything_equally(clients, extra, seed):
    count = clients + extra
    parts = partition.iid(count, clients, clients, seed)
    assert sorted(np.concatenate([part.train_rows for part in parts])) == list(range(count))
    sizes = [len(part.train_rows) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    fixed = partition.iid(count, clients, clients, seed, train_per_client=count // clients, test_per_client=1)
    assert {len(part.train_rows) for part in fixed} == {count // clients}


def test_iid_refuses():
    with pytest.raises(UserError, match=r"train_per_client 6: allowed are 1 to 5 \(10 for 2 clients\)"):
        partition.iid(10, 10, 2, 0, train_per_client=6)
    with pytest.raises(UserError, match="1 test samples for 2 clients"):
        partition.iid(10, 1, 2, 0)


def test_by_group_with_test_groups():
    parts = partition.by_group(torch.tensor([7, 3, 7, 9]), torch.tensor([9, 3, 5, 7, 3]))
    assert [part.train_rows.tolist() for part in parts] == [[1], [0, 2], [3]]
    assert [part.test_rows.tolist() for part in parts] == [[1, 4], [3], [0]]  # group 5 never trains
    assert not parts[0].test_from_train


def test_by_group_holds_out_training_rows():
    groups = np.repeat([0, 1, 2], [2, 10, 50])
    parts = partition.by_group(groups, test_fraction=0.2, seed=3)
    assert [(len(p.train_rows), len(p.test_rows)) for p in parts] == [(1, 1), (8, 2), (40, 10)]
    assert all(part.test_from_train and disjoint([part.train_rows, part.test_rows]) for part in parts)
    assert all((groups[np.r_[p.train_rows, p.test_rows]] == i).all() for i, p in enumerate(parts))
    assert same(parts, partition.by_group(groups, test_fraction=0.2, seed=3))
    assert not same(parts, partition.by_group(groups, test_fraction=0.2, seed=4))


def test_by_group_refuses():
    with pytest.raises(UserError, match="group 4 has no test samples"):
        partition.by_group([3, 4], [3, 3])
    with pytest.raises(UserError, match="group 4 has 1 sample"):
        partition.by_group([3, 3, 4])
    with pytest.raises(UserError, match="test_fraction 1: allowed are numbers between 0 and 1"):
        partition.by_group([3, 3], test_fraction=1)


def test_given():
    parts = partition.given([[3, 1], [0]], [[0, 1], [1]], 5, 2)
    assert [part.train_rows.tolist() for part in parts] == [[1, 3], [0]]
    assert [part.test_rows.tolist() for part in parts] == [[0, 1], [1]]
    shared = partition.given([[3, 1], [0]], None, 5, 2)
    assert [part.test_rows.tolist() for part in shared] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([], None, "no clients"),
        ([[0], [1]], [[0]], "2 lists of train rows but 1 lists of test rows"),
        ([[0, 1], [1]], None, "clients 0 and 1 share train row 1"),
        ([[0, 0]], None, "client 0 has train row 0 twice"),
        ([[0], []], None, "client 1 has no train rows"),
        ([[0]], [[]], "client 0 has no test rows"),
        ([[5]], None, "client 0, train row 5: allowed are 0 to 4"),
        ([[-1]], None, "client 0, train row -1: allowed are 0 to 4"),
        ([[0]], [[2]], "client 0, test row 2: allowed are 0 to 1"),
        ([[0.5]], None, "allowed is a list of whole numbers"),
        ([[True, False]], None, "allowed is a list of whole numbers"),
        ([[[0, 1]]], None, "allowed is a list of whole numbers"),
    ],
)
def test_given_refuses(train, test, message):
    with pytest.raises(UserError, match=message):
        partition.given(train, test, 5, 2)


@given(st.integers(1, 8), st.integers(1, 5), st.floats(0.01, 0.99), st.integers(0, 3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_hold_out_keeps_its_promises(clients, classes, fraction, seed, labelled):
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, classes, clients * rng.integers(1, 30))
    before = partition.iid(len(targets), clients, clients, seed)
    after = partition.hold_out(before, fraction, seed, torch.from_numpy(targets if labelled else targets * 1.5))
    for old, new in zip(before, after, strict=True):
        assert sorted(np.r_[new.train_rows, new.validation_rows]) == old.train_rows.tolist()
        n, held = len(old.train_rows), len(new.validation_rows)
        assert held == min(max(round(fraction * n), 1), n - 1)
        if labelled:
            wanted = np.bincount(targets[old.train_rows], minlength=classes) * held / n
            assert abs(np.bincount(targets[new.validation_rows], minlength=classes) - wanted).max() < 1
        assert (new.test_rows == old.test_rows).all()


def test_hold_out_of_nothing_and_of_everything():
    parts = partition.iid(10, 2, 2, 0)
    assert same(partition.hold_out(parts, 0, 0, np.zeros(10, int)), parts)
    for fraction in (1, -0.1, np.nan):
        with pytest.raises(UserError, match="allowed are numbers from 0 to below 1"):
            partition.hold_out(parts, fraction, 0, np.zeros(10, int))


def test_parts_give_arrays():
    dataset = load("digits")
    parts = partition.by_class(dataset.train.targets, dataset.test.targets, 5, 2, 0)
    part = partition.hold_out(parts, 0.1, 0, dataset.train.targets)[0]
    train, validation, test = part.train(dataset), part.validation(dataset), part.test(dataset)
    assert set(train.targets.tolist()) == set(validation.targets.tolist()) == set(test.targets.tolist())
    assert torch.equal(train.inputs[0], dataset.train.inputs[part.train_rows[0]])
    held = partition.by_group(dataset.train.targets)[3]
    assert set(held.test(dataset).targets.tolist()) == {3}
    assert torch.equal(held.test(dataset).inputs[0], dataset.train.inputs[held.test_rows[0]])
