"""The regularizer of one layer, R(x, c) = 1/2 sum_k min_j |x_k - c_j|, and its proximal maps in weights and centers.

Weights x (n,), centers sorted ascending (m,); of a stack of clients (k, n) and (k, m), each by itself. The 1/2 is the
paper's; code that drops it has half of our lambda.
"""

from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

from qupel.core.quantize import assign, boundaries, center_gradient, hard, pick
from qupel.util.errors import UserError

RULES = ("exact", "first_order", "paper")

Pull = float | Tensor  # a prox strength t; of a stack of clients also one each, float64 (k, 1)

_REACH_UP_TO = 8  # centers; beyond that sorting all weights is as fast as looking around every center


def distance(x: Tensor, centers: Tensor) -> Tensor:
    """R(x, c) = 1/2 sum_k |x_k - Q_c(x)_k|, a scalar. (n,), (m,) -> ()."""
    return (x - hard(x, centers)).abs().sum() / 2


def prox_weights(y: Tensor, centers: Tensor, t: Pull, *, q: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """argmin_x |x - y|^2/2 + t R(x, c): every weight moves t/2 towards its nearest center and stops there.

    Q + sign(y - Q) max(|y - Q| - t/2, 0) with Q = Q_c(y), t = eta1 lambda. (..., n), (..., m) -> (..., n).
    q: Q_c(y), if at hand. A weight stays with its center, so it is Q_c of the result, too. out: may be y itself.
    """
    if isinstance(t, float | int) and t == 0:
        return y.clone() if out is None else out.copy_(y)
    q = hard(y, centers) if q is None else q  # (..., n)
    if isinstance(t, float | int) and not t / 2 <= torch.finfo(y.dtype).max:  # softshrink would raise, centers diverge
        t = torch.tensor([t], dtype=torch.float64, device=y.device)
    if isinstance(t, float | int):
        return torch.add(torch.nn.functional.softshrink(y - q, t / 2), q, out=out)
    away, most = y - q, (t / 2).to(y.dtype)  # (k, n), (k, 1); or (n,), (1,)
    x = away.sub_(away.clamp(-most, most)).add_(q)
    x = torch.where(t == 0, y, x) if bool((t == 0).any()) else x
    return x if out is None else out.copy_(x)


def prox_centers(
    mu: Tensor,
    centers: Tensor,
    x: Tensor,
    t: Pull,
    rule: str = "exact",
    *,
    codes: Tensor | None = None,
    without: Tensor | None = None,
) -> Tensor:
    """Prox of the centers after their gradient step mu = c - eta2 h, t = eta2 lambda; sorted.

    (..., m), (..., m), (..., n) -> (..., m). With kappa = t/2 and S_j the weights nearest to c_j (n_j of them):
    exact        argmin_c (c - mu_j)^2/2 + kappa sum_{S_j} |c - x_k|, that is the median of the 2 n_j + 1 numbers
                 {x_k : k in S_j} and {mu_j + kappa (n_j - 2k) : k = 0..n_j}; it cannot overshoot
    first_order  mu_j + kappa (#{x_k > c_j} - #{x_k < c_j}), a step along the subgradient at c
    paper        the same with the minus sign that the paper prints, which drives centers away from their weights
    A center without weights keeps mu_j.
    codes: assign(x, centers), if at hand (the exact rule does not need it).
    without: weights that sit on their center and do not pull at it (..., n).
    """
    if rule not in RULES:
        raise UserError(f"rule must be one of {', '.join(RULES)}, not {rule!r}")
    kappa = t / 2
    if isinstance(kappa, float) and kappa == 0:
        return mu.sort().values
    if rule == "exact" and isinstance(kappa, float) and x.ndim == 1:
        return _exact(mu, centers, x if without is None else x[~without], kappa).sort().values
    if rule == "exact":
        return _exact_stack(mu, centers, x, kappa, without).sort().values
    codes = assign(x, centers) if codes is None else codes
    side = torch.sign(x - pick(centers, codes))  # (..., n); 0 on a center
    push = center_gradient(side.double(), codes, centers.shape[-1])  # #{x_k > c_j} - #{x_k < c_j} (..., m)
    sign = 1 if rule == "first_order" else -1
    return (mu + sign * kappa * push).to(mu.dtype).sort().values


def _exact(mu: Tensor, centers: Tensor, x: Tensor, kappa: float) -> Tensor:
    """Clusters are intervals, so one sort of the layer sorts them all; and a center moves at most kappa n_j, so with
    few centers it is faster to find the weights within their reach and to sort only these."""
    edges = boundaries(centers).tolist()
    on_cpu = x.device.type == "cpu"
    values = (x.detach() if on_cpu else x.detach().sort().values).cpu().numpy()  # (n,)
    if not on_cpu or len(centers) > _REACH_UP_TO:
        values = np.sort(values) if on_cpu else values
        cuts = np.searchsorted(values, np.array(edges, values.dtype), side="right").tolist()
        clusters = zip([0, *cuts], [*cuts, len(values)], mu.tolist(), strict=True)
        return mu.new_tensor([_minimizer(values[a:b], m, kappa, 0, b - a) for a, b, m in clusters])

    def above(edge: float) -> np.ndarray:
        return np.greater(values, edge)

    count = [len(values), *(int(np.count_nonzero(above(e))) for e in edges), 0]  # weights above each edge
    inside = np.zeros(len(values), bool)  # weights within reach of their center: low_j < x_k <= high_j
    reach = []
    for m, a, b, left, right in zip(mu.tolist(), count, count[1:], [-np.inf, *edges], [*edges, np.inf], strict=False):
        low = min(max(_next(m - kappa * (a - b), -np.inf, values.dtype), left), right)
        high = min(max(_next(m + kappa * (a - b), np.inf, values.dtype), left), right)
        over = above(low)
        inside ^= over
        inside ^= above(high)
        reach.append((low, high, m, a - int(np.count_nonzero(over)), a - b))
    few = 8 * np.count_nonzero(inside) < len(values)
    near = np.sort(values[inside] if few else values)  # picking many weights costs more than sorting all
    low, high, *_ = zip(*reach, strict=True)
    starts, ends = (near.searchsorted(np.array(side, near.dtype), side="right").tolist() for side in (low, high))
    found = [
        _minimizer(near[a:b], m, kappa, below, n) for a, b, (_, _, m, below, n) in zip(starts, ends, reach, strict=True)
    ]
    return mu.new_tensor(found)


def _next(value: float, towards: float, dtype: np.dtype) -> float:
    """A number of the weights' type that is strictly on that side of `value`."""
    return float(np.nextafter(dtype.type(value), dtype.type(towards)))


def _minimizer(values: np.ndarray, mu: float, kappa: float, below: int, n: int) -> float:
    """argmin_c (c - mu)^2/2 + kappa sum_k |c - x_k| for sorted values x_1 <= .. <= x_n, in log2(n) comparisons.

    `values` are those that the center can reach, `below` of the n lie below them and the rest above.
    Between x_k and x_{k+1} the derivative is c - p_k with p_k = mu + kappa (n - 2k), falling in k. Take the least k
    with p_k <= x_{k+1} (x_0 = -inf, x_{n+1} = inf). If p_k >= x_k the derivative is 0 at c = p_k; otherwise
    p_k < x_k < p_{k-1} and it jumps over 0 at c = x_k. So c = max(p_k, x_k).
    """

    def p(k: int) -> float:
        return mu + kappa * (n - 2 * (below + k))

    k = bisect_left(range(len(values)), True, key=lambda k: p(k) <= values.item(k))  # values.item(k) is x_{below+k+1}
    return max(p(k), values.item(k - 1)) if k > 0 else p(k)


def _exact_stack(mu: Tensor, centers: Tensor, x: Tensor, kappa: Pull, without: Tensor | None) -> Tensor:
    """`_minimizer` for every center of every client at once: the same comparisons, on arrays (k, m)."""
    if without is not None:
        x = x.masked_fill(without, torch.inf)  # behind all others
    values = np.sort(x.detach().cpu().numpy(), axis=-1)  # (k, n)
    ends = np.isfinite(values).sum(-1, keepdims=True) if without is not None else np.full((len(x), 1), x.shape[-1])
    cuts = torch.searchsorted(torch.from_numpy(values), boundaries(centers).cpu(), right=True).numpy()  # (k, m-1)
    cuts = np.concatenate([np.zeros_like(ends), np.minimum(cuts, ends), ends], axis=-1)  # clusters are intervals
    start, n = cuts[:, :-1], np.diff(cuts)  # (k, m)
    mean, step = mu.double().cpu().numpy(), kappa.cpu().numpy() if isinstance(kappa, Tensor) else kappa
    client = np.arange(len(n))[:, None]  # (k, 1)

    def p(k: np.ndarray) -> np.ndarray:
        return mean + step * (n - 2 * k)

    def value(k: np.ndarray) -> np.ndarray:  # x_{k+1} of each cluster, also where there is none
        return values[client, np.clip(start + k, 0, values.shape[-1] - 1)]

    low, high = np.zeros_like(n), n  # the least k with p_k <= x_{k+1} lies in low..high (k, m)
    while (low < high).any():
        middle = (low + high) // 2
        found = p(middle) <= value(middle)
        low, high = np.where(found | (low == high), low, middle + 1), np.where(found, middle, high)
    least = np.where(low > 0, np.maximum(p(low), value(low - 1)), p(low))
    return torch.from_numpy(least).to(mu)
