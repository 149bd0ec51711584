# %% [markdown]
# # From a federation to a device
# Each client's model leaves as one ONNX file: 2-bit codes and a table of levels, unpacked by stock ONNX operators. On
# the device there is ONNX Runtime and no torch, and none of our code.

# %%
import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

import qupel

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32").reshape(-1, 1, 8, 8)
clients = [(x[k::6][:60], y[k::6][:60], x[k::6][60:], y[k::6][60:]) for k in range(3)]
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
)  # fmt: skip
fit = qupel.fit(net, clients, bits=[2, 3, 32], rounds=20, local_steps=20)

# %%
files = fit.save("devices", to="onnx")
for client, (file, score) in enumerate(zip(files, fit.test, strict=True)):
    print(f"client {client}: {file.stat().st_size / 1024:.0f} KiB, {100 * score:.1f} %")

# %% [markdown]
# ## On the device
# Its file and numpy. The score is the one that the federation reported, to the last sample.

# %%
for client, file in enumerate(files):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    test_inputs, test_targets = clients[client][2:]
    (outputs,) = session.run(None, {session.get_inputs()[0].name: test_inputs})
    right = (outputs.argmax(1) == test_targets).mean()
    assert np.isclose(right, fit.test[client]), (client, right, fit.test[client])
print("every file gives its client's score in ONNX Runtime")

# %% [markdown]
# `qupel export RUN --all --to onnx` does the same for a run of the command line, `qupel plan` says which bits fit a
# device, and `bits = "auto"` with `budget = ["16 KiB", "64 KiB"]` chooses them.
