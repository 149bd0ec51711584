"""Inputs whose size step sizes are not made for: divided by one number, which goes with every model."""

import numpy as np
import pytest
import torch

import qupel
from qupel.data.samples import Arrays
from qupel.data.scale import unit_of
from qupel.deploy.file import load
from tiny import CLASSES, INPUTS, blobs, mlp


def clients(size):
    data, parts = blobs()
    every = []
    for part in parts:
        train, test = data.train.read(part.train_rows), data.test.read(part.test_rows)
        every.append(
            (size * train.inputs.numpy(), train.targets.numpy(), size * test.inputs.numpy(), test.targets.numpy())
        )
    return every


def fit(size, **more):
    torch.manual_seed(0)
    return qupel.fit(mlp(), clients(size), rounds=6, local_steps=3, batch=4, quiet=True, **more)


@pytest.mark.parametrize(("size", "unit"), [(1.0, 1.0), (0.41, 1.0), (2.4, 1.0), (0.3, 0.3), (25.0, 25.0), (0.0, 1.0)])
def test_a_unit_is_the_median_clients_root_mean_square_where_that_is_unusual(size, unit):
    inputs = torch.full((12, 3), size) * torch.tensor([1.0, -1.0, 1.0])
    inputs[:4] *= 100  # one of three clients: not the median
    samples = Arrays(inputs, torch.zeros(12, dtype=torch.int64))
    assert unit_of(samples, [np.arange(4 * k, 4 * k + 4) for k in range(3)]) == pytest.approx(unit)


def test_usual_inputs_are_left_alone():
    found, off = fit(1.0), fit(1.0, standardize="off")
    assert found.about.std == ()
    for a, b in zip(found.models, off.models, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_the_models_that_come_back_take_inputs_as_the_clients_have_them(tmp_path):
    small = fit(0.001)
    (unit,) = set(small.about.std)
    by_hand = [(a / np.float32(unit), b, c / np.float32(unit), d) for a, b, c, d in clients(0.001)]
    torch.manual_seed(0)
    same = qupel.fit(mlp(), by_hand, rounds=6, local_steps=3, batch=4, quiet=True, standardize="off")
    for i, (_, _, inputs, targets) in enumerate(clients(0.001)):
        said = small.models[i](torch.from_numpy(inputs)).argmax(1).numpy()
        assert (said == targets).mean() == pytest.approx(small.test[i])
        torch.testing.assert_close(
            small.models[i](torch.from_numpy(inputs)),
            same.models[i](torch.from_numpy(by_hand[i][2])),
            rtol=1e-3,
            atol=1e-4,
        )
    path = small.save(tmp_path)[0]
    about = load(path).about
    assert (about.mean, about.std) == ((0.0,) * INPUTS, (unit,) * INPUTS)
    packed = qupel.load(path, mlp())  # as all files: fed what their `mean` and `std` make of inputs
    torch.testing.assert_close(
        packed(torch.from_numpy(by_hand[0][2])),
        small.models[0](torch.from_numpy(clients(0.001)[0][2])),
        rtol=1e-3,
        atol=1e-4,
    )
    late = small.adapt(clients(0.001)[:1])
    said = late.models[0](torch.from_numpy(clients(0.001)[0][2])).argmax(1).numpy()
    assert (said == clients(0.001)[0][3]).mean() == pytest.approx(late.test[0])
    assert small.models[0](torch.from_numpy(clients(0.001)[0][2])).shape[1] == CLASSES
