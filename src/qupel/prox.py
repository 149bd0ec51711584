"""The regularizer of one layer, R(x, c) = 1/2 sum_k min_j |x_k - c_j|, and its proximal maps in weights and centers.

Weights x (n,), centers sorted ascending (m,). The 1/2 is the paper's; code that drops it has half of our lambda.
"""

import numpy as np
import torch
from torch import Tensor

from qupel.errors import UserError
from qupel.quantize import assign, boundaries, center_gradient

RULES = ("exact", "first_order", "paper")


def distance(x: Tensor, centers: Tensor, *, codes: Tensor | None = None) -> Tensor:
    """R(x, c) = 1/2 sum_k min_j |x_k - c_j|. (n,), (m,) -> ()."""
    codes = assign(x, centers) if codes is None else codes
    return (x - centers.index_select(0, codes)).abs().sum() / 2


def prox_weights(y: Tensor, centers: Tensor, t: float, *, codes: Tensor | None = None) -> Tensor:
    """argmin_x |x - y|^2/2 + t R(x, c): every weight moves t/2 towards its nearest center and stops there.

    Q + sign(y - Q) max(|y - Q| - t/2, 0) with Q = Q_c(y), t = eta1 lambda. (n,), (m,) -> (n,).
    codes: assign(y, centers), if at hand. A weight stays with its center, so they are the codes of the result, too.
    """
    if t == 0:
        return y.clone()
    codes = assign(y, centers) if codes is None else codes
    q = centers.index_select(0, codes)  # (n,)
    return torch.nn.functional.softshrink(y - q, t / 2).add_(q)


def prox_centers(
    mu: Tensor, centers: Tensor, x: Tensor, t: float, rule: str = "exact", *, codes: Tensor | None = None
) -> Tensor:
    """Prox of the centers after their gradient step mu = c - eta2 h, t = eta2 lambda; sorted. (m,), (m,), (n,) -> (m,).

    With kappa = t/2 and S_j the weights nearest to c_j (n_j of them):
    exact        argmin_c (c - mu_j)^2/2 + kappa sum_{S_j} |c - x_k|, that is the median of the 2 n_j + 1 numbers
                 {x_k : k in S_j} and {mu_j + kappa (n_j - 2k) : k = 0..n_j}; it cannot overshoot
    first_order  mu_j + kappa (#{x_k > c_j} - #{x_k < c_j}), a step along the subgradient at c
    paper        the same with the minus sign that the paper prints, which drives centers away from their weights
    A center without weights keeps mu_j.
    codes: assign(x, centers), if at hand (the exact rule does not need it).
    """
    if rule not in RULES:
        raise UserError(f"rule must be one of {', '.join(RULES)}, not {rule!r}")
    kappa = t / 2
    if kappa == 0:
        return mu.sort().values
    if rule == "exact":
        return _exact(mu, centers, x, kappa).sort().values
    codes = assign(x, centers) if codes is None else codes
    side = torch.sign(x - centers.index_select(0, codes))  # (n,)
    push = center_gradient(side.double(), codes, len(centers))  # #{x_k > c_j} - #{x_k < c_j} (m,)
    sign = 1 if rule == "first_order" else -1
    return (mu + sign * kappa * push).to(mu.dtype).sort().values


def _exact(mu: Tensor, centers: Tensor, x: Tensor, kappa: float) -> Tensor:
    """The least k in 0..n with p_k <= x_{k+1} gives c = max(p_k, x_k). Of all centers at once, by bisection on k.

    Here x_1 <= .. <= x_n is the sorted cluster (x_0 = -inf, x_{n+1} = inf) and p_k = mu + kappa (n - 2k) falls in k.
    Between x_k and x_{k+1} the derivative is c - p_k: if p_k >= x_k it is 0 at c = p_k, otherwise p_k < x_k < p_{k-1}
    and it jumps over 0 at c = x_k. Clusters are intervals, so one sort of the layer sorts them all. The m-sized
    arithmetic is in float64, on the CPU.
    """
    values = _sorted(x)  # (n,)
    cut = torch.searchsorted(values, boundaries(centers), right=True).cpu()  # (m-1,)
    start = torch.cat([cut.new_zeros(1), cut])  # (m,)
    size = torch.cat([cut, cut.new_tensor([len(x)])]) - start  # n_j (m,)
    middle = mu.double().cpu()  # (m,)

    def value(k: Tensor) -> Tensor:  # x_k of every cluster, k counted from 1 and within the cluster
        return values[(start + k - 1).clamp(0, len(x) - 1).to(x.device)].double().cpu()

    def line(k: Tensor) -> Tensor:  # p_k
        return middle + kappa * (size - 2 * k).double()

    low, high = torch.zeros_like(size), size.clone()  # the least k lies in low..high
    for _ in range(len(x).bit_length()):
        k = (low + high) // 2
        found = (k >= size) | (line(k) <= value(k + 1))
        low, high = torch.where(found, low, k + 1), torch.where(found, k, high)
    low = torch.minimum(low, size)
    best = torch.where(low > 0, torch.maximum(line(low), value(low)), line(low))
    return best.to(mu)


def _sorted(x: Tensor) -> Tensor:
    """Ascending values. On the CPU NumPy's vectorized sort is some 15 times as fast as torch.sort."""
    x = x.detach()
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy()))
    return x.sort().values
