"""Run a model that stays packed in memory: a quantized weight is decoded when it is asked for, and forgotten after.

Memory: the packed codes, the rest, and one dense layer at a time. Every layer computes with its own forward on the same
numbers as the dense model, so the outputs are the same bit for bit. Time: decoding is added to every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from qupel.deploy.own import NOTHING, Allowed
from qupel.deploy.packed import Layer, Packed
from qupel.util.errors import UserError


def keep_packed(packed: Packed, module: nn.Module | None = None, allowed: Allowed = NOTHING) -> nn.Module:
    """The network with its quantized layers left packed, for inference only.

    module   your network, which is changed; built in `with deploy.empty():` it never takes the memory of the
             dense model. Without it the network that the file names is built that way.
    allowed  which network of your own the file may name
    """
    module = packed.network(allowed) if module is None else module
    packed.check(module)
    layers = {layer.name: layer for layer in packed.layers}
    first = {id(p): name for name, p in module.named_parameters()}  # shared ones by their first name
    for path, owner in list(module.named_modules()):
        left = {}
        for key, p in list(owner._parameters.items()):
            name = first.get(id(p), "")
            if p is None:
                continue
            if name in layers:
                left[key] = layers[name]
            else:
                value = torch.tensor(packed.rest[name]).to(p.dtype)
                setattr(owner, key, nn.Parameter(value, requires_grad=p.requires_grad))  # an LSTM lists it, too
        if left:
            _leave_packed(owner, left)
        for key, buffer in owner._buffers.items():
            name = f"{path}.{key}" if path else key
            if buffer is not None and name in packed.rest:
                owner._buffers[key] = torch.tensor(packed.rest[name]).to(buffer.dtype)
            elif buffer is not None and key == "num_batches_tracked":
                owner._buffers[key] = torch.zeros((), dtype=buffer.dtype)
            elif buffer is not None and buffer.is_meta:
                raise UserError(f"{name!r} is not in the file; build the network outside of empty()")
    return module.eval()


def _leave_packed(owner: nn.Module, layers: Mapping[str, Layer]) -> None:
    """Let the dense weight be made whenever it is asked for: an attribute of a class of its own. Not only the layer
    itself asks: attention takes its output layer's weight without calling that layer."""
    made: dict[str, Any] = {}
    for key, layer in layers.items():
        del owner._parameters[key]
        made[key] = property(partial(_dense, layer))
    if isinstance(owner, nn.RNNBase):
        del owner.__dict__["_flat_weights"]
        made["_flat_weights"] = property(lambda self: [getattr(self, name) for name in self._flat_weights_names])
        made["_update_flat_weights"] = lambda self: None
    owner.__class__ = type(type(owner).__name__, (type(owner),), made)


def _dense(layer: Layer, owner: nn.Module) -> torch.Tensor:
    """The weight as a tensor like the dense model's, trained where that costs nothing and not made for inference only:
    how torch multiplies depends on both, and with that the last bits."""
    trained = not torch.is_grad_enabled()
    with torch.inference_mode(False):
        return torch.from_numpy(layer.weights()).requires_grad_(trained)
