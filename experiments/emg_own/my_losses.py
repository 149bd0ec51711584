"""A loss of one's own."""

from torch import Tensor
from torch.nn import functional as F


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of -(1 - p)^2 log p, p the probability of the right class (Lin et al., ICCV 2017): what is right already
    counts less."""
    log_p = F.log_softmax(outputs, 1).gather(1, targets.unsqueeze(1)).squeeze(1)  # (n,)
    return -((1 - log_p.exp()).square() * log_p).mean()
