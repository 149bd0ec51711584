"""Run a model that stays packed in memory: each quantized layer is decoded when its turn comes, and forgotten after.

Memory: the packed codes, the rest, and one dense layer at a time. Every layer computes with its own forward on the same
numbers as the dense model, so the outputs are the same bit for bit. Time: decoding is added to every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qupel.deploy.packed import Layer, Packed
from qupel.util.errors import UserError


def keep_packed(packed: Packed, module: nn.Module | None = None) -> nn.Module:
    """The network with its quantized layers left packed, for inference only.

    module  your network, which is changed; built in `with deploy.empty():` it never takes the memory of the
            dense model. Without it the network that the file names is built that way.
    """
    module = packed.empty_model() if module is None else module
    packed.check(module)
    layers = {layer.name: layer for layer in packed.layers}
    first = {id(p): name for name, p in module.named_parameters()}  # shared ones by their first name
    for path, owner in list(module.named_modules()):
        for key, p in list(owner._parameters.items()):
            name = first.get(id(p), "")
            if p is None:
                continue
            if name in layers:
                _leave_packed(owner, key, layers[name])
            else:
                owner._parameters[key] = nn.Parameter(torch.tensor(packed.rest[name]).to(p.dtype), requires_grad=False)
        for key, buffer in owner._buffers.items():
            name = f"{path}.{key}" if path else key
            if buffer is not None and name in packed.rest:
                owner._buffers[key] = torch.tensor(packed.rest[name]).to(buffer.dtype)
            elif buffer is not None and key == "num_batches_tracked":
                owner._buffers[key] = torch.zeros((), dtype=buffer.dtype)
            elif buffer is not None and buffer.is_meta:
                raise UserError(f"{name!r} is not in the file; build the network outside of empty()")
    return module.eval()


def _leave_packed(owner: nn.Module, key: str, layer: Layer) -> None:
    """Put the dense weight in its place only while the owner's forward runs."""
    del owner._parameters[key]

    def decode(owner: nn.Module, inputs: Any) -> None:
        setattr(owner, key, torch.from_numpy(layer.weights()))

    def forget(owner: nn.Module, inputs: Any, output: Any) -> None:
        owner.__dict__.pop(key, None)

    owner.register_forward_pre_hook(decode)
    owner.register_forward_hook(forget, always_call=True)
