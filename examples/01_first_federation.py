# %% [markdown]
# # A first federation
# Ten clients have four of the ten digits each, and each ends with a model of its own: five with 2 bits a weight, four
# with 3 bits, one at full precision. They learn together; their data stay where they are.

# %%
import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import nn

import qupel
from qupel.data import load, partition

# %% [markdown]
# ## Clients
# A client is its training data and its test data. Here scikit-learn's digits are dealt out, four classes a client.

# %%
digits = load("digits")
parts = partition.by_class(digits.train.targets, digits.test.targets, clients=10, classes_per_client=4, seed=0)
clients = []
for k, part in enumerate(parts):
    train, test = digits.train.take(part.train_rows[:40]), digits.test.take(part.test_rows)
    clients.append(qupel.Client(train.inputs, train.targets, test.inputs, test.targets, name=f"phone {k}"))
print([sorted(set(np.asarray(c.train_targets).tolist())) for c in clients[:3]])

# %% [markdown]
# ## Training
# Any network with Linear or convolutional layers. All layers but the first and the last are quantized.

# %%
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
)  # fmt: skip
fit = qupel.fit(net, clients, bits=[2] * 5 + [3] * 4 + [32], rounds=20, local_steps=20, evaluate_every=4)
for name, bits, score in zip(fit.names, fit.quantized, fit.test, strict=True):
    print(f"{name}: {100 * score:.0f} %  {bits or 'full precision'}")

# %% [markdown]
# ## What came of it
# Files are packed: a 2-bit weight takes 2 bits.

# %%
files = fit.save("models")
print({file.name: file.stat().st_size for file in (files[0], files[5], files[9])})
again = qupel.load(files[0], net)  # the same network, filled with client 0's weights
assert torch.equal(again(clients[0].test), fit.models[0](clients[0].test))

plt.plot([line["round"] for line in fit.metrics], [100 * line["test"] for line in fit.metrics], marker="o")
plt.xlabel("round")
plt.ylabel("mean test accuracy, %")
plt.savefig("rounds.png")
