"""How uploads become the next w: against numpy, closed forms and numbers by hand; one by one or all at once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qupel.parts.base import Upload
from qupel.parts.servers import Sum, add, servers, sums
from qupel.parts.servers.fedadagrad import FedAdagrad
from qupel.parts.servers.fedadam import FedAdam
from qupel.parts.servers.fedavgm import FedAvgM
from qupel.parts.servers.fedyogi import FedYogi
from qupel.parts.servers.krum import Krum
from qupel.parts.servers.mean import Mean
from qupel.parts.servers.median import Median
from qupel.parts.servers.normbound import NormBound
from qupel.parts.servers.trimmed import TrimmedMean
from toy import every, name


def vectors(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def server_round(server, w, state, uploads, shares):
    """One round: uploads come one by one, in one buffer that is written over again."""
    so_far = None
    for upload, share in zip(uploads, shares, strict=True):
        lent = Upload(tuple(row.clone() for row in upload.rows), upload.shares)
        so_far = server.add(so_far, lent, share)
        for row in lent.rows:
            row.fill_(torch.nan)
    return server.finish(w, so_far, state)


def mean(rows, shares, w=None):
    """The server's mean of one row from each client."""
    w = torch.zeros_like(rows[0]) if w is None else w
    (found,), state = server_round(Mean(), (w,), (), [Upload((row,)) for row in rows], shares)
    assert state == ()
    return found


# --- the mean ---


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(0, 1000), st.booleans())
def test_mean_equals_numpy_in_float64(n, seed, weighted):
    """One at a time, in client order, is all at once, to the bit."""
    g = torch.Generator().manual_seed(seed)
    uploads = [torch.randn(30, generator=g) * 10.0 ** float(torch.randint(-3, 4, (), generator=g)) for _ in range(n)]
    shares = [float(torch.randint(1, 100, (), generator=g)) if weighted else 1.0 for _ in range(n)]
    stacked = np.stack([u.numpy().astype(np.float64) * share for u, share in zip(uploads, shares, strict=True)])
    expected = torch.from_numpy(np.add.reduce(stacked, 0) / sum(shares))
    got = mean(uploads, shares)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected.float(), rtol=1e-7, atol=0)
    total = torch.zeros(30).double()
    for u, share in zip(uploads, shares, strict=True):
        total += u.double() * share
    assert torch.equal(got, (total / sum(shares)).float())


def test_weighted_mean_by_hand():
    got = mean([torch.tensor([1.0, 0.0]), torch.tensor([4.0, 8.0])], [3.0, 1.0])
    assert got.tolist() == [1.75, 2.0]


def test_the_mean_of_one_upload_is_the_upload():
    """Whatever its share; float32 survives float64 and the division by a power of two."""
    row = vectors(100)
    assert torch.equal(mean([row], [1.0]), row)
    assert torch.equal(mean([row], [8.0]), row)


def test_float64_holds_what_float32_would_lose():
    assert mean([torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])], [1.0, 1.0, 1.0]).item() == (
        torch.tensor(1 / 3).item()
    )


def test_rows_have_shares_of_their_own_and_one_that_nobody_sent_stays():
    """Three rows, as of a method with three cluster models; clients take part in some of them."""
    w = tuple(torch.full((2,), float(v)) for v in (10, 20, 30))
    rows = [tuple(torch.full((2,), float(v)) for v in values) for values in ((1, 2, 3), (5, 7, 9))]
    uploads = [Upload(rows[0], torch.tensor([1.0, 0.5, 0.0])), Upload(rows[1], torch.tensor([0.0, 0.25, 0.0]))]
    found, _ = server_round(Mean(), w, (), uploads, [1.0, 4.0])
    # row 0: only the first client; row 1: weights 1 * 0.5 and 4 * 0.25; row 2: nobody
    assert found[0].tolist() == [1, 1]
    assert found[1].tolist() == pytest.approx([(0.5 * 2 + 1.0 * 7) / 1.5] * 2)
    assert found[2] is w[2]


def test_no_shares_are_ones():
    rows = (vectors(5), vectors(5, seed=1))
    given_ones = add(None, Upload(rows, torch.ones(2)), 2.5)
    none = add(None, Upload(rows), 2.5)
    assert none.weights == given_ones.weights == [2.5, 2.5]
    assert all(torch.equal(a, b) for a, b in zip(none.rows, given_ones.rows, strict=True))


def test_rows_that_do_not_fit_are_refused():
    so_far = add(None, Upload((vectors(5),)), 1.0)
    with pytest.raises(ValueError, match="zip"):
        Sum(so_far.rows, so_far.weights).mean((vectors(5), vectors(5)))


# --- momentum ---


def rounds(server, targets, w, steps=6):
    """Clients that pull what they were sent halfway to their targets: (w after each round, what was sent)."""
    rows, state = (w,), server.start((w,))
    after, sent = [], []
    for _ in range(steps):
        out = server.send(rows, state)
        uploads = [Upload((out[0] + 0.5 * (t - out[0]),)) for t in targets]
        rows, state = server_round(server, rows, state, uploads, [1.0] * len(targets))
        after.append(rows[0])
        sent.append(out[0])
    return after, sent


TARGETS = list(vectors(4, 6, seed=5, dtype=torch.float64))


def halfway(v):
    """The mean of what clients make of v."""
    return v + 0.5 * (sum(TARGETS) / len(TARGETS) - v)


@pytest.mark.parametrize(("beta", "rate"), [(0.9, 1.0), (0.5, 0.7), (0.0, 0.3)])
def test_fedavgm_by_formula(beta, rate):
    w = vectors(6, dtype=torch.float64)
    after, sent = rounds(FedAvgM(beta, rate), TARGETS, w)
    v = torch.zeros(6).double()
    for got, out in zip(after, sent, strict=True):
        torch.testing.assert_close(out, w, rtol=1e-12, atol=1e-12)
        v = beta * v + (halfway(w) - w)
        w = w + rate * v
        torch.testing.assert_close(got, w, rtol=1e-12, atol=1e-12)


def test_nesterov_momentum_is_the_closed_form():
    """Broadcast W = w_t + beta (w_t - w_{t-1});  w_{t+1} = mean of what the clients make of W."""
    beta, w = 0.8, vectors(6, dtype=torch.float64)
    after, sent = rounds(FedAvgM(beta, nesterov=True), TARGETS, w)
    before = w
    for got, out in zip(after, sent, strict=True):
        ahead = w + beta * (w - before)
        torch.testing.assert_close(out, ahead, rtol=1e-12, atol=1e-12)
        before, w = w, halfway(ahead)
        torch.testing.assert_close(got, w, rtol=1e-12, atol=1e-12)
    assert (sent[2] - after[1]).abs().max() > 1e-3  # it did look ahead


def test_nesterov_with_a_rate():
    """v <- beta v + (mean - W),  w <- w + rate v  at  W = w + beta v."""
    beta, rate, w = 0.8, 0.6, vectors(6, dtype=torch.float64)
    after, _ = rounds(FedAvgM(beta, rate, nesterov=True), TARGETS, w)
    v = torch.zeros(6).double()
    for got in after:
        ahead = w + beta * v
        v = beta * v + (halfway(ahead) - ahead)
        w = w + rate * v
        torch.testing.assert_close(got, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_no_momentum_is_the_mean(nesterov):
    w = vectors(6, dtype=torch.float64)
    plain, _ = rounds(Mean(), TARGETS, w)
    still, _ = rounds(FedAvgM(0.0, 1.0, nesterov), TARGETS, w)
    for a, b in zip(plain, still, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_row_nobody_sent_rolls_on_with_its_momentum():
    """mean - w = 0 for it:  v <- beta v,  w <- w + rate v."""
    w, v = (vectors(3), vectors(3, seed=1)), (vectors(3, seed=2), vectors(3, seed=3))
    upload = Upload((vectors(3, seed=4), vectors(3, seed=5)), torch.tensor([1.0, 0.0]))
    found, state = server_round(FedAvgM(0.5, 0.8), w, v, [upload], [2.0])
    torch.testing.assert_close(state[1], 0.5 * v[1])
    torch.testing.assert_close(found[1], w[1] + 0.8 * 0.5 * v[1])
    torch.testing.assert_close(state[0], 0.5 * v[0] + (upload.rows[0] - w[0]))


# --- others ---


SECOND = {
    FedAdam(0.05, 0.8, 0.9, 0.01): lambda v, d: 0.9 * v + 0.1 * d**2,
    FedYogi(0.05, 0.8, 0.9, 0.01): lambda v, d: v - 0.1 * d**2 * torch.sign(v - d**2),
    FedAdagrad(0.05, 0.8, 0.01): lambda v, d: v + d**2,
}


@pytest.mark.parametrize("server", SECOND, ids=name)
def test_adaptive_servers_by_formula(server):
    rate, b1, tau, w = 0.05, 0.8, 0.01, vectors(6, dtype=torch.float64)
    after, sent = rounds(server, TARGETS, w)
    m, v = torch.zeros(6).double(), torch.full((6,), tau**2).double()
    for got, out in zip(after, sent, strict=True):
        torch.testing.assert_close(out, w, rtol=1e-8, atol=1e-8)
        d = halfway(w) - w
        m = b1 * m + (1 - b1) * d
        v = SECOND[server](v, d)
        w = w + rate * m / (v.sqrt() + tau)
        torch.testing.assert_close(got, w, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_median_is_numpys(n):
    """Whatever the shares; one client that sends what it likes moves it no further than its neighbor."""
    rows = [vectors(9, seed=k) for k in range(n)]
    (found,), _ = server_round(
        Median(), (torch.zeros(9),), (), [Upload((r,)) for r in rows], [1.0 + k for k in range(n)]
    )
    expected = np.median(np.stack([r.numpy() for r in rows]), axis=0)
    torch.testing.assert_close(found, torch.from_numpy(expected))
    if n == 5:
        wild = [*rows[:4], torch.full((9,), 1e30)]
        (held,), _ = server_round(Median(), (torch.zeros(9),), (), [Upload((r,)) for r in wild], [1.0] * n)
        assert bool((held <= torch.stack(rows[:4]).amax(0)).all())


@pytest.mark.parametrize(
    ("n", "trim", "cut"), [(1, 0.4, 0), (2, 0.4, 0), (5, 0.1, 1), (10, 0.2, 2), (10, 0.25, 3), (6, 0, 0)]
)
def test_trimmed_mean_is_scipys_without_the_ends(n, trim, cut):
    """Whatever the shares; two clients of ten that send what they like move it no further than the others' ends."""
    rows = [vectors(9, seed=k) for k in range(n)]
    server, uploads = TrimmedMean(trim), [Upload((r,)) for r in rows]
    (found,), _ = server_round(server, (torch.zeros(9),), (), uploads, [1.0 + k for k in range(n)])
    expected = stats.trim_mean(np.stack([r.numpy() for r in rows]).astype(np.float64), cut / n, axis=0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-7)
    if cut == 2:
        wild = [*rows[:8], torch.full((9,), 1e30), torch.full((9,), -1e30)]
        (held,), _ = server_round(server, (torch.zeros(9),), (), [Upload((r,)) for r in wild], [1.0] * n)
        assert bool((held <= torch.stack(rows[:8]).amax(0)).all())
        assert bool((held >= torch.stack(rows[:8]).amin(0)).all())


def test_a_trim_of_half_is_refused():
    with pytest.raises(ValueError, match=r"trim = 0\.5"):
        TrimmedMean(0.5)


@pytest.mark.parametrize("bound", [None, 0.5, 1e9])
def test_norm_bound_by_formula(bound):
    """Row by row in numpy; a bound that nobody reaches is the mean; one client far away moves w by its share of it."""
    w, rows = vectors(9, seed=20), [vectors(9, seed=k) for k in range(5)]
    uploads = [Upload((r,)) for r in rows]
    (found,), _ = server_round(NormBound(bound), (w,), (), uploads, [1.0 + k for k in range(5)])
    away = [(r - w).numpy().astype(np.float64) for r in rows]
    most = np.median([np.linalg.norm(d) for d in away]) if bound is None else bound
    expected = w.numpy() + np.mean([d * min(1, most / np.linalg.norm(d)) for d in away], axis=0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)
    if bound == 1e9:
        torch.testing.assert_close(found, mean(rows, [1.0] * 5))
        return
    wild = [*rows[:4], torch.full((9,), 1e20)]
    (held,), _ = server_round(NormBound(bound), (w,), (), [Upload((r,)) for r in wild], [1.0] * 5)
    assert float((held - w).norm()) <= float(max(np.linalg.norm(d) for d in away)) + 1e-4


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        NormBound(0.0)


def krum_by_hand(rows, bad, keep):
    """Scores as the paper has them, one upload after the other."""
    points = [r.numpy().astype(np.float64) for r in rows]
    f = int(np.ceil(bad * len(points) - 1e-9))
    scores = []
    for i, a in enumerate(points):
        apart = sorted(float(((a - b) ** 2).sum()) for j, b in enumerate(points) if j != i)
        scores.append(sum(apart[: max(1, len(points) - f - 2)]))
    best = sorted(range(len(points)), key=lambda i: scores[i])[: keep or len(points) - f]
    return np.mean([points[i] for i in best], axis=0)


@pytest.mark.parametrize(("bad", "keep"), [(0.3, None), (0.3, 1), (0.0, None), (0.1, 4)])
def test_krum_by_hand(bad, keep):
    """Whatever the shares; with nobody bad it is the mean."""
    rows = [vectors(9, seed=k) for k in range(10)]
    uploads = [Upload((r,)) for r in rows]
    (found,), _ = server_round(Krum(bad, keep), (torch.zeros(9),), (), uploads, [1.0 + k for k in range(10)])
    np.testing.assert_allclose(found.numpy(), krum_by_hand(rows, bad, keep), rtol=1e-6, atol=1e-7)
    if bad == 0:
        torch.testing.assert_close(found, mean(rows, [1.0] * 10))


@pytest.mark.parametrize("wild", [1e15, -50.0])
def test_krum_leaves_out_those_who_stand_apart(wild):
    """Three of ten send the same far vector, and none of them counts."""
    honest = [0.1 * vectors(9, seed=k) for k in range(7)]
    uploads = [Upload((r,)) for r in (*honest, *[torch.full((9,), wild)] * 3)]
    (found,), _ = server_round(Krum(0.3), (torch.zeros(9),), (), uploads, [1.0] * 10)
    torch.testing.assert_close(found, mean(honest, [1.0] * 7))


@pytest.mark.parametrize(("settings", "said"), [({"bad": 0.5}, "bad"), ({"keep": 0}, "keep")])
def test_a_krum_of_nobody_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Krum(**settings)


# --- every server ---


@pytest.mark.parametrize("server", every(servers), ids=name)
def test_a_server_that_says_so_needs_no_more_than_the_sum(server):
    """Two uploads, or their mean twice: the same to it. The others tell them apart."""
    w, (a, b, c) = (vectors(7),), (vectors(7, seed=k) for k in (1, 2, 3))
    apart = [Upload((row,)) for row in (a, b, c)]
    middle = [Upload((((a.double() + b.double() + c.double()) / 3).float(),))] * 3
    found = [server_round(server, w, server.start(w), uploads, [1.0] * 3)[0][0] for uploads in (apart, middle)]
    assert torch.allclose(*found, rtol=1e-5, atol=1e-6) == sums(server)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("server", every(servers), ids=name)
def test_every_server_keeps_what_it_was_given(server, rows):
    """w, its state and the uploads are not written into; what comes out is of the same shapes and types."""
    w = tuple(vectors(7, seed=k) for k in range(rows))
    state = server.start(w)
    for step in range(3):
        uploads = [Upload(tuple(vectors(7, seed=10 * step + k + i) for i in range(rows))) for k in range(3)]
        held = [*w, *state]
        copies = [t.clone() for t in held]
        sent = server.send(w, state)
        new, after = server_round(server, w, state, uploads, [1.0, 2.0, 3.0])
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
        assert [(r.shape, r.dtype) for r in (*new, *sent)] == [(r.shape, r.dtype) for r in (*w, *w)]
        assert [(t.shape, t.dtype) for t in after] == [(t.shape, t.dtype) for t in state]
        assert all(bool(torch.isfinite(t).all()) for t in (*new, *after))
        w, state = new, after


@pytest.mark.parametrize("server", every(servers), ids=name)
def test_every_server_starts_out_sending_w(server):
    w = (vectors(7),)
    assert all(torch.equal(a, b) for a, b in zip(server.send(w, server.start(w)), w, strict=True))


@pytest.mark.parametrize("server", every(servers), ids=name)
def test_a_row_of_share_zero_is_as_if_it_was_not_sent(server):
    """What stands in it does not matter; of a model that nobody sent nothing changes in the first round."""
    w = (vectors(7), vectors(7, seed=1))
    shares = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])

    def found(filler):
        uploads = [Upload((vectors(7, seed=k), torch.full((7,), filler)), shares[k]) for k in range(3)]
        return server_round(server, w, server.start(w), uploads, [1.0, 2.0, 3.0])[0]

    assert torch.equal(found(5.0)[0], found(-3.0)[0])
    assert torch.equal(found(5.0)[1], w[1])
