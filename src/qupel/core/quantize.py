"""Quantizers of one layer: its weights x as a flat vector (n,), its centers sorted ascending (m,).

The same of a stack of clients: weights (k, n), centers (k, m), each client by itself. Shapes are written (..., n).

Hard: Q_c(x)_k = the center nearest to x_k.
Soft: Q~_c(x)_k = c_1 + sum_{j=2..m} (c_j - c_{j-1}) sigmoid(P (x_k - (c_j + c_{j-1})/2)), a rounded staircase.

m may be any number from 1 on, not only a power of two.
"""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from qupel.util.errors import UserError

BITS = range(1, 9)
LEVELS = range(1, 257)
INITS = ("paper", "range", "signs", "kmeans", "quantile", "aciq")

_COMPARE_UP_TO = 32  # levels; comparing with every boundary beats a branching binary search up to about here
_BINS = 1_024  # k-means is solved exactly on at most this many bins


# --- hard ---


def boundaries(centers: Tensor) -> Tensor:
    """Where the nearest center changes: x belongs to a center above j exactly when x > boundary j.

    (..., m) -> (..., m-1). The midpoint of c_j and c_{j+1}, rounded down, so that comparing is exact for every
    representable x and a tie goes to the lower center. Of equal centers all weights go to the first.
    """
    half = centers.detach().cpu().numpy() / 2  # m numbers: NumPy's calls cost less than torch's
    low, high = half[..., :-1], half[..., 1:]  # (..., m-1)
    middle = low + high
    shift = middle - low
    error = (low - (middle - shift)) + (high - shift)  # of low + high, exactly (Knuth's two-sum)
    middle = np.where(error < 0, np.nextafter(middle, -np.inf, dtype=half.dtype), middle)
    # No weight stops between equal centers: the next real boundary above holds for them, too.
    middle[low == high] = np.inf
    real = np.minimum.accumulate(middle[..., ::-1], axis=-1)[..., ::-1]  # (..., m-1)
    return torch.from_numpy(real.copy()).to(centers.device)


def assign(x: Tensor, centers: Tensor) -> Tensor:
    """Code of every weight: argmin_j |x_k - c_j|, a tie goes to the lower one. (..., n), (..., m) -> (..., n) int64."""
    edges = boundaries(centers)  # (..., m-1)
    x = x.detach()
    if x.device.type != "cpu" or not 2 <= centers.shape[-1] <= _COMPARE_UP_TO:
        return torch.searchsorted(edges, x.contiguous())
    values = x.numpy()  # NumPy compares some 8 times as fast as torch
    first, *others = np.moveaxis(edges.numpy()[..., None], -2, 0)  # each (..., 1)
    below = np.greater(values, first).view(np.uint8)  # boundaries below x_k (..., n)
    above = np.empty(below.shape, bool)
    for edge in others:
        below += np.greater(values, edge, out=above).view(np.uint8)
    return torch.from_numpy(below).long()


def hard(x: Tensor, centers: Tensor) -> Tensor:
    """Q_c(x): every weight becomes its nearest center. Differentiable in the centers only.

    (..., n), (..., m) -> (..., n).
    """
    return pick(centers, assign(x, centers))


def pick(centers: Tensor, codes: Tensor, out: Tensor | None = None) -> Tensor:
    """The center of every code. (..., m), (..., n) -> (..., n)."""
    if centers.ndim == 1:
        return torch.index_select(centers, 0, codes, out=out)
    return torch.gather(centers, -1, codes, out=out)


def center_gradient(upstream: Tensor, codes: Tensor, m: int) -> Tensor:
    """grad_c f(Q_c(x))_j = sum of df/dQ over the weights assigned to c_j. (..., n), (..., n) -> (..., m).

    This is the hard mode of the paper (straight-through on the centers), not the limit of `soft_gradient`, whose
    boundary terms do not vanish as P grows.
    """
    return upstream.new_zeros(*upstream.shape[:-1], m).scatter_add_(-1, codes, upstream)


def counts(codes: Tensor, m: int) -> Tensor:
    """n_j, the number of weights assigned to each center. (..., n) -> (..., m) int64."""
    if codes.device.type != "cpu" or m > _COMPARE_UP_TO:
        each = codes.reshape(-1, codes.shape[-1])  # (k, n)
        apart = each + m * torch.arange(len(each), device=codes.device)[:, None]  # every client has codes of its own
        return torch.bincount(apart.flatten(), minlength=m * len(each)).view(*codes.shape[:-1], m)
    small = codes.numpy().astype(np.uint8)
    if codes.ndim == 1:
        return torch.tensor([int(np.count_nonzero(small == j)) for j in range(m)])
    bits = (np.packbits(small == j, axis=-1) for j in range(m))  # NumPy counts along an axis 10 times as slow as bits
    return torch.from_numpy(np.stack([np.bitwise_count(b).sum(-1, dtype=np.int64) for b in bits], axis=-1))


def dead_centers(codes: Tensor, m: int) -> Tensor:
    """Indices of the centers that no weight is assigned to, ascending."""
    return (counts(codes, m) == 0).nonzero().flatten()


# --- soft ---


def steepness(centers: Tensor, sharpness: float) -> Tensor:
    """P = sharpness / mean gap, with mean gap (c_m - c_1)/(m - 1); a constant for autograd. (..., m) -> (..., 1).

    P has a meaning only relative to the gap between centers: P * gap (the sharpness) around 4 is nearest to the
    identity, 50 and more is a staircase, towards 0 the quantizer is constant. With no gap (one center, or all equal)
    the soft quantizer is that center whatever P; then P = 0.
    """
    if not sharpness > 0:
        raise UserError(f"sharpness must be greater than 0, not {sharpness!r}")
    centers = centers.detach()
    span = centers[..., -1:] - centers[..., :1]  # (..., 1)
    return torch.where(span > 0, sharpness * (centers.shape[-1] - 1) / span, 0.0)


def soft_at(x: Tensor, centers: Tensor, P: Tensor | float) -> Tensor:
    """Q~_c(x) = c_1 + sum_{j=2..m} (c_j - c_{j-1}) sigmoid(P (x - (c_j + c_{j-1})/2)). (..., n), (..., m) -> (..., n).

    Differentiable in x and in the centers; as P grows it tends to `hard` away from the boundaries.
    """
    first, *_ = columns = centers.split(1, -1)  # m times (..., 1)
    q = first.expand(x.shape)  # (..., n)
    for low, high in pairwise(columns):
        q = q + (high - low) * torch.sigmoid(P * (x - (high + low) / 2))
    return q


def soft_gradient(x: Tensor, centers: Tensor, P: Tensor | float, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of f(Q~_c(x)) in x and c, given upstream = df/dQ.

    (..., n), (..., m), (..., n) -> (..., n), (..., m).

    With s_j = sigmoid(P (x - (c_j + c_{j-1})/2)), j = 2..m:
        dQ~/dx   = P sum_j (c_j - c_{j-1}) s_j (1 - s_j)
        dQ~/dc_j = A_j - B_j,  A_1 = 1,  A_j = s_j - (c_j - c_{j-1}) (P/2) s_j (1 - s_j),
                               B_m = 0,  B_{j-1} = s_j + (c_j - c_{j-1}) (P/2) s_j (1 - s_j).
    The same as autograd through `soft_at`, without a graph and in O(n) memory.
    """
    with torch.no_grad():
        slope = torch.zeros_like(x)  # dQ~/dx (..., n)
        grad_centers = torch.zeros_like(centers)  # (..., m)
        grad_centers[..., 0] = upstream.sum(-1)  # A_1
        for j, (low, high) in enumerate(pairwise(centers.split(1, -1)), 1):  # each (..., 1)
            s = torch.sigmoid(P * (x - (high + low) / 2))  # (..., n)
            bell = P * (high - low) * s * (1 - s)  # (..., n)
            slope += bell
            step, edge = torch.linalg.vecdot(upstream, s), torch.linalg.vecdot(upstream, bell) / 2  # (...)
            grad_centers[..., j] += step - edge  # A_j
            grad_centers[..., j - 1] -= step + edge  # B_{j-1}
        return upstream * slope, grad_centers


# --- first centers ---


def init_centers(x: Tensor, bits: int | None = None, how: str = "paper", *, levels: int | None = None) -> Tensor:
    """First centers of a layer, sorted: m = 2^bits of them, or m = levels if given. (n,) -> (m,).

    paper     two levels: as signs; otherwise as range
    range     m points evenly from min to max
    signs     the mean of the negative and the mean of the positive weights (two levels only); if all weights have one
              sign, the means of the weights up to and above their mean
    kmeans    minimizes sum_k min_j (x_k - c_j)^2: exactly up to 1024 weights, beyond that exactly on 1024 bins of
              neighboring weights and then by Lloyd's iteration on all of them
    quantile  the (j + 1/2)/m quantiles, j = 0..m-1
    aciq      the middles of m even cells from mean - a to mean + a, where a clips a Laplace distribution of the layer's
              deviation b = mean |x - mean| with the least squared error (Banner et al., NeurIPS 2019): 2 b exp(-a/b) =
              2 a / (3 m^2), that is a = b W(3 m^2), W Lambert's function; not beyond the least and largest weight

    Deterministic. A constant layer gets m equal centers.
    """
    if levels is None:
        if bits is None or bits not in BITS:
            raise UserError(f"bits must be a whole number from {BITS[0]} to {BITS[-1]}, not {bits!r}")
        levels = 2**bits
    elif levels not in LEVELS:
        raise UserError(f"levels must be a whole number from {LEVELS[0]} to {LEVELS[-1]}, not {levels!r}")
    if how not in INITS:
        raise UserError(f"how must be one of {', '.join(INITS)}, not {how!r}")
    if how == "signs" and levels != 2:
        raise UserError(f"how = 'signs' gives 2 levels, not {levels}")
    x = x.detach().flatten()
    if len(x) == 0 or not bool(torch.isfinite(x).all()):
        raise UserError("centers need at least one weight, and only finite ones")
    if how == "paper":
        how = "signs" if levels == 2 else "range"
    if how == "range":
        return _even(x, levels)
    if how == "signs":
        return _signs(x)
    if how == "kmeans":
        return _kmeans(x, levels)
    if how == "aciq":
        return _clipped(x, levels)
    return _quantiles(x.sort().values, levels)


def _even(x: Tensor, m: int) -> Tensor:
    low, high = (float(v) for v in x.aminmax())
    if m == 1:
        low = high = low / 2 + high / 2
    return torch.linspace(low, high, m, dtype=x.dtype, device=x.device)


def _clipped(x: Tensor, m: int) -> Tensor:
    a = math.log(3 * m**2)
    for _ in range(20):  # Newton's steps to a exp(a) = 3 m^2
        a -= (a - 3 * m**2 * math.exp(-a)) / (1 + a)
    clip, (least, most) = a * (x - x.mean()).abs().mean(), x.aminmax()
    low, high = (x.mean() - clip).clamp(least, most), (x.mean() + clip).clamp(least, most)
    return low + (high - low) * (torch.arange(m, dtype=x.dtype, device=x.device) + 0.5) / m


def _signs(x: Tensor) -> Tensor:
    below, above = x[x < 0], x[x > 0]
    if len(below) == 0 or len(above) == 0:
        below, above = x[x <= x.mean()], x[x > x.mean()]
    if len(below) == 0 or len(above) == 0:  # a constant layer
        return x[:1].repeat(2)
    return torch.stack([below.mean(), above.mean()])


def _quantiles(values: Tensor, m: int) -> Tensor:
    """Quantiles of sorted values, linear between neighbors (torch.quantile refuses more than 16 million values)."""
    position = (torch.arange(m, dtype=torch.float64, device=values.device) + 0.5) / m * (len(values) - 1)  # (m,)
    below = position.long()
    above = (below + 1).clamp(max=len(values) - 1)
    return torch.lerp(values[below], values[above], (position - below).to(values.dtype))


def _kmeans(x: Tensor, m: int) -> Tensor:
    """1-D k-means: clusters of sorted values are segments, a partition is m + 1 cuts, means come from prefix sums."""
    values = torch.from_numpy(np.sort(x.cpu().numpy())).double()  # (n,); NumPy sorts some 15 times as fast as torch
    n = len(values)
    total = torch.cat([values.new_zeros(1), (values - values.mean()).cumsum(0)])  # prefix sums (n+1,)

    def means(cuts: Tensor) -> Tensor:  # (m+1,) -> (m,)
        start, end = cuts[:-1], cuts[1:]
        mean = (total[end] - total[start]) / (end - start).clamp(min=1) + values.mean()
        # The clamp undoes rounding, and puts the center of an empty segment between its neighbors.
        first = values[start.clamp(max=n - 1)]
        return torch.minimum(torch.maximum(mean, first), torch.maximum(values[(end - 1).clamp(min=0)], first))

    cuts = _best_cuts(values, total, m)
    while True:  # Lloyd: the objective falls until the cuts repeat
        centers = means(cuts)
        moved = torch.searchsorted(values, boundaries(centers), right=True)  # (m-1,)
        moved = torch.cat([cuts[:1], moved, cuts[-1:]])
        if torch.equal(moved, cuts) or not _spread(total, moved) > _spread(total, cuts):
            return centers.to(x.dtype).sort().values.to(x.device)
        cuts = moved


def _spread(total: Tensor, cuts: Tensor) -> Tensor:
    """sum_j n_j mean_j^2 of the segments: the sum of squares that the centers explain (larger is better)."""
    size = (cuts[1:] - cuts[:-1]).clamp(min=1)
    return ((total[cuts[1:]] - total[cuts[:-1]]) ** 2 / size).sum()


def _best_cuts(values: Tensor, total: Tensor, m: int) -> Tensor:
    """The best m segments whose cuts lie on an even grid of at most 1024 bins, by dynamic programming. -> (m+1,).

    The best last cut before k never falls as k grows. So it is looked for everywhere only at every 32nd k, and in
    between only from one neighbor's to the other's.
    """
    bins = min(len(values), _BINS)
    grid = np.linspace(0, len(values), bins + 1).round().astype(np.int64)  # (b+1,)
    sums = total.numpy()[grid]  # (b+1,)

    def explained(k: slice | list[int], i: slice) -> np.ndarray:
        """What one segment from cut i to cut k explains; -inf where it would run backwards. (rows, columns)."""
        size = grid[k][:, None] - grid[i]
        return np.where(size >= 0, (sums[k][:, None] - sums[i]) ** 2 / np.maximum(size, 1), -np.inf)

    anchors = [*range(0, bins, 32), bins]
    best, steps = explained(slice(None), slice(0, 1))[:, 0], []  # the best that segments up to cut k explain (b+1,)
    for _ in range(m - 1):
        previous, grown = np.empty(bins + 1, np.int64), np.empty(bins + 1)

        def look(k: slice | list[int], low: int, high: int, best: np.ndarray = best) -> tuple[np.ndarray, np.ndarray]:
            candidates = best[low:high] + explained(k, slice(low, high))
            found = candidates.argmax(1)
            return low + found, candidates[np.arange(len(found)), found]

        previous[anchors], grown[anchors] = look(anchors, 0, bins + 1)
        for a, b in pairwise(anchors):
            between = slice(a + 1, b)
            low, high = sorted((int(previous[a]), int(previous[b])))  # rounding may turn a tie around
            previous[between], grown[between] = look(between, low, high + 1)
        best = grown
        steps.append(previous)
    cuts = [bins]
    for previous in reversed(steps):
        cuts.append(int(previous[cuts[-1]]))
    return torch.from_numpy(grid[[0, *cuts[::-1]]])
