"""Which network each client has, the shared one or one of its own, and the levels that this gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from qupel.core.codebook import Plan, plan_bits
from qupel.core.layout import Layout
from qupel.data import sources
from qupel.deploy.budget import Planner
from qupel.run.config import Config
from qupel.run.sections import NetworkConfig
from qupel.tasks import zoo
from qupel.util.errors import UserError

if TYPE_CHECKING:
    from qupel.run.jobs import Cell

Bits = int | Mapping[str, int]

# --- of a config ---


def model_name(config: Config, cell: Cell) -> str:
    return config.methods[cell.label].model or config.model.name


def networks_of(config: Config, cell: Cell) -> tuple[NetworkConfig, ...]:
    """The clients' own networks, the first one the first client's, repeated as needed. The shared one's name stands for
    the shared one."""
    shared = NetworkConfig(name=model_name(config, cell), args=config.model.args, layers=config.model.layers)
    given = config.methods[cell.label].networks
    own = config.model.networks if given is None else given
    made = (NetworkConfig(name=n) if isinstance(n, str) else n for n in own)
    return tuple(shared if n == NetworkConfig(name=shared.name) else n for n in made) or (shared,)


def network_of(config: Config, cell: Cell, client: int) -> NetworkConfig:
    known = networks_of(config, cell)
    return known[client % len(known)]


def network_names(config: Config, cell: Cell, clients: int) -> list[str]:
    """Of each client's network, as a job has them: "" for the shared one."""
    shared = (model_name(config, cell), config.model.args)
    each = (network_of(config, cell, i) for i in range(clients))
    return ["" if (n.name, n.args) == shared else n.title for n in each]


def build_networks(config: Config, data: sources.Dataset, cell: Cell) -> dict[str, nn.Module]:
    """Those that are not the shared one, by name."""
    known = networks_of(config, cell)
    names = network_names(config, cell, len(known))
    return {
        name: zoo.build(n.name, data.shape, data.classes, cell.seed, n.args)
        for name, n in zip(names, known, strict=True)
        if name
    }


# --- of a fit ---


def named_networks(
    given: Sequence[nn.Module | str | None], clients: int, known: Mapping[str, nn.Module] = MappingProxyType({})
) -> tuple[dict[str, nn.Module], list[str]]:
    """(new networks by name, the name of each client's): a name is the class and the number of parameters."""
    if given and len(given) != clients:
        raise UserError(f"networks: {len(given)} entries for {clients} clients")
    found: dict[str, nn.Module] = {}
    names = []
    for one in given or [None] * clients:
        if one is not None and not isinstance(one, nn.Module | str):
            raise UserError(f"networks: a {type(one).__name__}; allowed are a torch.nn.Module, and None for `model`")
        if isinstance(one, str) and one not in known:
            raise UserError(f"networks: {one!r} is none of the run's; allowed: {', '.join(known) or 'none'}")
        name = one if isinstance(one, str) else "" if one is None else _name(one, {**known, **found})
        names.append(name)
        if isinstance(one, nn.Module):
            found[name] = one
    return found, names


def _name(module: nn.Module, known: Mapping[str, nn.Module]) -> str:
    size = sum(p.numel() for p in module.parameters())
    name, k = f"{type(module).__name__} ({size:,})", 2
    while name in known and known[name] is not module:
        name, k = f"{type(module).__name__} ({size:,}) #{k}", k + 1
    return name


def plans_by_network(
    modules: Mapping[str, nn.Module],
    network: Sequence[str],
    bits: Sequence[Bits],
    sizes: list[int] | None,
    layers: Sequence[str] | None,
    channels: bool,
) -> list[Plan]:
    """Levels for each client, by its network; layers: of the shared one, ""."""
    found: dict[int, Plan] = {}
    for name in dict.fromkeys(network):
        at = [i for i, own in enumerate(network) if own == name]
        limits = [sizes[i] for i in at] if sizes else None
        of = _plans_for(modules[name], [bits[i] for i in at], limits, None if name else layers, channels)
        found |= dict(zip(at, of, strict=True))
    return [found[i] for i in range(len(network))]


def _plans_for(
    module: nn.Module,
    bits: Sequence[Bits],
    budgets: Sequence[int] | None,
    layers: Sequence[str] | None,
    channels: bool,
) -> list[Plan]:
    """Levels for each client: of these bits, or where there are budgets the widest that fit; by the errors of the
    module's own layers."""
    layout = Layout.of(module)
    if budgets is None:
        made = {repr(b): plan_bits(layout, b, layers, channels) for b in {repr(b): b for b in bits}.values()}
        return [made[repr(b)] for b in bits]
    planner = Planner(module, layers=layers, channels=channels)
    found = {size: planner.fit(size).bits for size in dict.fromkeys(budgets)}
    return [plan_bits(layout, found[size], channels=channels) for size in budgets]
