"""Commands for a federation on Flower, from init to clean. `cli.py` registers them."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from qupel.flower.templates import DEFAULT_CONFIG
from qupel.flower.watch import show, show_log, tell
from qupel.util.errors import UserError
from qupel.util.terminal import shown

if TYPE_CHECKING:
    from qupel.flower.control import Node
    from qupel.flower.folder import Federation
    from qupel.flower.server import Request
    from qupel.run.config import Config
    from qupel.run.jobs import Cell

app = typer.Typer(no_args_is_help=True, help="A federation over machines that do not trust each other, on Flower.")
out = Console()
err = Console(stderr=True)

Dir = Annotated[Path, typer.Argument(help="folder of the federation")]
Clients = Annotated[int, typer.Option("--clients", min=1, help="number of clients")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="take data, split and bits from this config")]
Server = Annotated[
    str | None, typer.Option("--server", help="the SuperLink (default: that of `up`, else 127.0.0.1:18443)")
]
TargetEpsilon = Annotated[
    float | None, typer.Option(min=0, help="differential privacy: what all rounds may cost; finds the noise")
]
Delta = Annotated[float | None, typer.Option(min=0, max=1, help="of --target-epsilon (default: 1e-5)")]
LEAST_SUM = 3  # as in `secagg`, which needs Flower's packages


@app.command()
def init(
    folder: Dir,
    clients: Clients = 3,
    address: Annotated[str, typer.Option(help="where clients reach the server, HOST:PORT")] = "127.0.0.1:8443",
    config: ConfigFile = None,
    venv: Annotated[str, typer.Option(help="where QuPeL is installed on the machines")] = "/opt/qupel",
) -> None:
    """Write a ready federation: certificates, keys, start commands, systemd units, client configs, the proxy rule."""
    made = _init(folder, clients, address, config, venv)
    out.print(
        f"{shown(made.folder)}: server/ stays here, clients/client-0 to client-{clients - 1} go to their machines"
    )
    out.print("[dim]a try-out on this machine: qupel flower up; real machines: docs/deploy.md[/dim]")


def _init(folder: Path, clients: int, address: str, config: Path | None, venv: str) -> Federation:
    require_flower()
    from qupel.flower import folder as folders
    from qupel.flower.task import named_modules
    from qupel.run import config as configs

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--address {address!r}: expected HOST:PORT, e.g. flower.example.org:8443")
    text = DEFAULT_CONFIG.format(clients=clients)
    parsed = configs.load(config) if config else configs.parse(text, "the default")
    host, beside = host.strip("[]"), config.resolve().parent if config else None
    made = folders.init(folder, clients, host, int(port), parsed, venv, beside)
    if named := named_modules(parsed):
        here, allow = folders.is_here(host), f"allow = {json.dumps(named)}"
        said = f"a try-out: every client.toml has {allow}, of {beside}"
        other = f"the config names modules of its own: owners that agree write {allow} into their client.toml"
        out.print(said if here else other, markup=False, highlight=False, soft_wrap=True)
    return made


@app.command()
def up(
    folder: Dir,
    clients: Annotated[int | None, typer.Option("--clients", min=1, help="clients to start (default: all)")] = None,
    config: ConfigFile = None,
) -> None:
    """Start the federation on this machine, on loopback, for a try-out; show who is connected."""
    require_flower()
    from qupel.flower import tryout
    from qupel.flower.folder import Federation

    if not (folder / "federation.json").exists():
        _init(folder, clients or 3, "127.0.0.1:8443", config, "/opt/qupel")
    federation = Federation.open(folder)
    _connected(
        tryout.up(federation, clients or federation.clients, tell=lambda text: out.print(f"[dim]{shown(text)}[/dim]"))
    )


@app.command()
def register(folder: Dir, server: Server = None) -> None:
    """On the server of real machines: let the clients' keys in, once; show who is connected, any time."""
    require_flower()
    from qupel.flower.control import Control
    from qupel.flower.folder import Federation
    from qupel.flower.trust import admit

    federation = Federation.open(folder)
    _warn(federation)
    with Control(_address(federation, server), federation.authority) as control:
        control.check()
        admit(federation, control)
        _connected(control.nodes())


@app.command()
def status(folder: Dir, server: Server = None) -> None:
    """Who is connected, and how long the certificates are valid."""
    require_flower()
    from qupel.flower.control import Control
    from qupel.flower.folder import Federation
    from qupel.flower.trust import days_left

    federation = Federation.open(folder)
    _warn(federation)
    out.print(f"certificates: {days_left(federation):.0f} days left", highlight=False)
    with Control(_address(federation, server), federation.authority) as control:
        control.check()
        _connected(control.nodes())


@app.command()
def revoke(
    folder: Dir,
    client: Annotated[str, typer.Argument(help="its name or number: client-3, 3")],
    server: Server = None,
) -> None:
    """Shut a client out for good: a running server refuses its key at once, another from its start."""
    require_flower()
    from qupel.flower import trust
    from qupel.flower.control import Control
    from qupel.flower.folder import Federation

    federation = Federation.open(folder)
    name = f"client-{client}" if client.isdecimal() else client
    trust.revoke(federation, name)
    with Control(_address(federation, server), federation.authority) as control:
        if not control.answers():
            out.print(
                f"{name} is revoked; no server answers on {control.address}: the next `up` or `register` tells it"
            )
            return
        trust.shut_out(federation, control)
    out.print(f"{name} is revoked: the server refuses its key from now on")


@app.command()
def renew(folder: Dir) -> None:
    """Make new certificates, for another five years. The clients' keys stay."""
    require_flower()
    from qupel.flower import trust
    from qupel.flower.folder import Federation

    federation = Federation.open(folder)
    before = trust.renew(federation)
    out.print(f"{federation.server}: new certificates; start the SuperLink again, and let the proxy read them")
    out.print(f"by {before:%Y-%m-%d} copy server/ca.crt to every client's folder: its old one is valid until then")


@app.command()
def clean(
    folder: Annotated[Path, typer.Argument(help="folder of the federation, or of one client")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be removed")] = False,
    days: Annotated[
        float | None,
        typer.Option(min=0, help="a job is old after so many (default: keep_days of the client)"),
    ] = None,
) -> None:
    """Remove what killed processes and old jobs have left: temporaries, orphaned workers, states. Models stay."""
    from qupel.flower import clean as cleaning

    if (folder / "federation.json").exists():
        found = cleaning.of_federation(folder.resolve(), days)
    elif (folder / "client.toml").exists():
        found = cleaning.of_client(folder.resolve(), days)
    else:
        raise UserError(f"{folder} is neither a federation's folder (federation.json) nor a client's (client.toml)")
    for left in [*found, *cleaning.of_machine()]:
        out.print(
            f"{'would remove' if dry_run else 'removed'} {left.what}", markup=False, highlight=False, soft_wrap=True
        )
        if not dry_run:
            left.remove()
    if not found:
        out.print("nothing of ours is left there")


def _warn(federation: Federation) -> None:
    """Say that the certificates come to their end; one line and exit code 2 where they have."""
    from qupel.flower.trust import warning

    if told := warning(federation):
        err.print(told, markup=False, highlight=False, soft_wrap=True)


def _connected(nodes: list[Node]) -> None:
    table = Table("client", "status")
    for node in nodes:
        table.add_row(shown(node.name), "revoked" if node.status == "unregistered" else shown(node.status))
    out.print(table)


@app.command()
def down(folder: Dir) -> None:
    """End exactly what `up` has started."""
    require_flower()
    from qupel.flower import tryout
    from qupel.flower.folder import Federation

    ended = tryout.down(Federation.open(folder))
    out.print(f"ended: {shown(', '.join(ended))}" if ended else "nothing was running")


@app.command()
def run(
    folder: Dir,
    config: Annotated[Path, typer.Argument(help="a TOML file, of which data, split and bits are the clients' own")],
    cell: Annotated[str | None, typer.Option("--cell", help="METHOD-sSEED, when the config has several")] = None,
    name: Annotated[str | None, typer.Option(help="of the run (default: the config's name and the time)")] = None,
    set: Annotated[list[str] | None, typer.Option("--set", help="override a key: --set rounds=10")] = None,
    minimum: Annotated[int | None, typer.Option(min=1, help="clients a round needs (all that are let in)")] = None,
    deadline: Annotated[float, typer.Option(min=1, help="seconds a round may take")] = 120.0,
    patience: Annotated[float, typer.Option(min=0, help="seconds to wait until enough clients are there")] = 600.0,
    upload: Annotated[str, typer.Option(help="codec of what clients send: fp32, fp16, int8")] = "fp32",
    most_weight: Annotated[float, typer.Option(min=1, help="weighted = true: medians a client may count for")] = 10.0,
    mode: Annotated[
        Literal["sync", "async"], typer.Option(help="a round waits for all that are asked, or for --buffer uploads")
    ] = "sync",
    buffer: Annotated[int | None, typer.Option(min=1, help="uploads that make a round of --mode async (3)")] = None,
    target_epsilon: TargetEpsilon = None,
    delta: Delta = None,
    secure: Annotated[bool, typer.Option("--secure", help="the server gets sums of uploads only")] = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="keep uploads, or sums, so that the run can be replayed")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run of this --name")] = False,
    server: Server = None,
) -> None:
    """Run a federation: every client ends with its own small model, on its own disk."""
    require_flower()
    from qupel.flower.folder import Federation
    from qupel.flower.late import buffer_of
    from qupel.flower.secure import check_secure
    from qupel.flower.server import Request, Terms, check_told
    from qupel.parts.codecs import codecs
    from qupel.run import config as configs
    from qupel.run.jobs import build_phases, one_cell
    from qupel.run.privacy import counted
    from qupel.run.sections import SecureConfig
    from qupel.run.settings import Length

    federation = Federation.open(folder)
    _warn(federation)
    private = {"target_epsilon": target_epsilon, "delta": delta}
    more = [f"privacy.{key}={value}" for key, value in private.items() if value is not None]
    parsed = counted(configs.load(config, [*(set or []), *more]), federation.folder)
    chosen = one_cell(parsed, cell)
    codecs.build(upload, "--upload")
    here = max(1, federation.clients - len(federation.revoked()))
    masked = parsed.secure or (SecureConfig() if secure else None)
    least = minimum or (max(LEAST_SUM, int(here * parsed.sample * masked.threshold) + 1) if masked else here)
    late = buffer_of(mode, buffer, here)
    terms = Terms(federation.clients, least, deadline, patience, upload, most_weight, late, masked, audit)
    check_told(parsed, terms)
    if masked:
        phases = build_phases(parsed.methods[chosen.label], Length(parsed.rounds, parsed.local_steps, 1))
        check_secure(phases, parsed.weighted, upload)
    if masked and not LEAST_SUM <= least <= here:
        raise UserError(f"--secure: {least} of {here} clients in a sum; allowed are {LEAST_SUM} and more, up to all")
    if resume and name is None:
        raise UserError("--resume needs --name, that of the run to go on with")
    name = name or f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    target = federation.folder / "runs" / name
    if resume:
        request = _known(target, parsed, chosen, terms)
        if (target / "result.json").exists():
            out.print(f"{shown(target)} is finished")
            return show(target)
    else:
        if target.exists():
            raise UserError(f"{target} already holds a run; add --resume to go on with it, or give another --name")
        job, beside = f"{chosen.name}-{secrets.token_hex(4)}", config.resolve().parent
        request = Request(job=job, config=parsed, label=chosen.label, seed=chosen.seed, terms=terms, modules=beside)
        request = request.model_copy(update={"peers": federation.server if masked else None})
        target.mkdir(parents=True)
    request.write(target)
    _drive(federation, server, target, "run")
    return show(target)


def _known(target: Path, config: Config, cell: Cell, terms: Any) -> Request:
    """The request of a run that is resumed: the same settings, but deadlines and the minimum may be new."""
    from qupel.flower.server import Request

    if not (target / "request.json").exists():
        raise UserError(f"{target} holds no run to resume")
    before = Request.read(target)
    asked = (config, cell.label, cell.seed)
    known, wanted = ((terms.upload, bool(terms.buffer), terms.secure, terms.audit) for terms in (before.terms, terms))
    if (before.config, before.label, before.seed) != asked or known != wanted:
        made = "another config, --cell, --upload, --mode, --secure or --audit"
        raise UserError(f"{target} was made with {made}; resume it with those")
    return before.model_copy(update={"terms": terms})


@app.command()
def export(
    folder: Dir,
    name: Annotated[str, typer.Argument(help="of a finished run")],
    server: Server = None,
) -> None:
    """Let every connected client write its packed model on its own disk, and report its size and test accuracy."""
    require_flower()
    from qupel.flower.folder import Federation

    federation = Federation.open(folder)
    _warn(federation)
    target = federation.folder / "runs" / name
    if not (target / "w.bin").exists():
        raise UserError(f"{target} holds no finished run")
    _drive(federation, server, target, "export")
    show(target)


@app.command()
def adapt(
    folder: Dir,
    name: Annotated[str, typer.Argument(help="of a finished run")],
    client: Annotated[
        list[int] | None, typer.Option("--client", help="number of a client (default: all without a model of the run)")
    ] = None,
    server: Server = None,
) -> None:
    """Serve clients after the end: each makes a small model of its own from the shared one, on its own machine."""
    require_flower()
    from qupel.flower.folder import Federation
    from qupel.flower.server import ADAPT, ADAPTED
    from qupel.util.files import write_json

    federation = Federation.open(folder)
    _warn(federation)
    target = federation.folder / "runs" / name
    if not (target / "w.bin").exists():
        raise UserError(f"{target} holds no finished run")
    for number in client or ():
        if not 0 <= number < federation.clients:
            raise UserError(f"--client {number}: allowed are 0 to {federation.clients - 1}")
    (target / ADAPT).unlink(missing_ok=True)
    if client:
        write_json(target / ADAPT, sorted(dict.fromkeys(client)))
    _drive(federation, server, target, "adapt")
    show(target, ADAPTED)


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(help="a client's folder, or DIR/runs/NAME of a run with --audit")],
    replay: Annotated[bool, typer.Option("--replay", help="of a run: compute w anew from its log")] = False,
    lines: Annotated[bool, typer.Option("--lines", help="every line of the log")] = False,
) -> None:
    """Check a log: what left a client, by job; or a server's run, which --replay computes anew to the same bits."""
    show_log(folder, lines)
    if replay:
        from qupel.flower.replay import replay as replayed

        rounds, found = replayed(folder)
        out.print(f"replayed: {rounds} rounds end with the same bits, w {found}", highlight=False, soft_wrap=True)


def require_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError("Flower is not installed; pip install 'qupel[flower]'") from None


def _drive(federation: Federation, server: str | None, target: Path, mode: Literal["run", "export", "adapt"]) -> None:
    from qupel.flower.drive import drive

    drive(federation, _address(federation, server), target, mode, tell)


def _address(federation: Federation, server: str | None) -> str:
    """As given, else where `up` has started it, else where server/start.sh does."""
    from qupel.flower.templates import INNER_PORT
    from qupel.flower.tryout import Running

    running = Running.of(federation)
    return server or (running.address if running else f"127.0.0.1:{INNER_PORT}")
