# %% [markdown]
# # Your own network and data
# Sensors of 8 people, a 1-D CNN, a loss and a metric of our own. What a function returns is all that matters.

# %%
import numpy as np
import torch
from torch import Tensor, nn

import qupel

# %% [markdown]
# ## Data
# Arrays, one tuple a client: train inputs, train targets, test inputs, test targets. Each person's sensor sits a bit
# differently: the same three gestures come with another phase and gain.


# %%
def person(k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """inputs float32 (n, 2, 32), targets (n,)"""
    rng = np.random.default_rng((k, n))
    gesture = rng.integers(0, 3, n)
    angle = 0.2 * k + 2.1 * gesture[:, None] + np.linspace(0, 6, 32) * (1 + gesture[:, None] / 4)
    wave = np.stack([np.sin(angle), np.cos(angle)], 1) * (1 + k / 8)
    return (wave + rng.normal(0, 1.3, wave.shape)).astype(np.float32), gesture


clients = [(*person(k, 24), *person(k, 60)) for k in range(8)]


# %% [markdown]
# ## Network, loss, metric


# %%
class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, width, 5, padding=2)
        self.second = nn.Conv1d(width, 2 * width, 5, padding=2)
        self.head = nn.Linear(8 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x + x.roll(1, 1)))  # no plain chain: anything that runs will do
        return self.head(nn.functional.adaptive_avg_pool1d(x, 4).flatten(1))


def gentle(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def worst_class(outputs: Tensor, targets: Tensor) -> float:
    right = (outputs.argmax(1) == targets).double()
    return float(min(right[targets == label].mean() for label in targets.unique()))


# %%
torch.manual_seed(0)
fit = qupel.fit(Net(), clients, bits=2, rounds=20, local_steps=5, loss=gentle, metrics={"worst class": worst_class})
last = fit.metrics[-1]
print(f"accuracy {last['test']:.2f}, worst class {last['test_worst class']:.2f}, quantized {fit.quantized[0]}")

# %% [markdown]
# The same in a config file, with workers, ranks or Flower: `qupel new DIR` writes such a project.
