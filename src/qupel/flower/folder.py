"""`qupel flower init DIR`: a whole federation as files.

DIR/federation.json            the server's public address, the number of clients
DIR/app/, app.fab              the Flower app, and its bundle: it names code that every machine has installed itself
DIR/server/                    authority and server certificate, the clients' public keys, start command, systemd unit,
                               proxy rule; stays on the server
DIR/clients/client-0/          what goes to client 0: its key, all clients' public keys (peers), the authority's
                               certificate, its config, start command, systemd unit, the hash of the one app it runs
DIR/runs/, DIR/logs/, up.json  made by `run` and `up`
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import os
import shlex
import socket
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qupel.flower import peers, templates
from qupel.util.errors import UserError
from qupel.util.files import sync_folder, write_atomic, write_json

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    from qupel.run.config import Config

LOOPBACK = "127.0.0.1"
YEARS = 5  # that certificates are valid


@dataclass(frozen=True)
class Federation:
    """A folder that `init` made."""

    folder: Path
    host: str  # where clients reach the server
    port: int
    clients: int

    @classmethod
    def open(cls, folder: Path) -> Federation:
        try:
            described = json.loads((folder / "federation.json").read_text())
        except FileNotFoundError:
            raise UserError(f"{folder} holds no federation; make one with `qupel flower init {folder}`") from None
        return cls(folder.resolve(), **described)

    @property
    def server(self) -> Path:
        return self.folder / "server"

    @property
    def authority(self) -> Path:
        return self.server / "ca.crt"

    def client(self, number: int) -> Path:
        return self.folder / "clients" / f"client-{number}"

    def revoked(self) -> set[str]:
        """Names of clients that are shut out."""
        return {path.stem for path in (self.server / "revoked").glob("*.pub")}

    def superlink(self, port: int, host: str = LOOPBACK) -> list[str]:
        """The command that starts the server's side. Its interfaces share one port: a proxy lets only the fleet in."""
        here = self.server
        return [
            "python", "-m", "qupel.flower.superlink",
            "--host", host,
            "--port", str(port),
            "--ssl-ca-certfile", str(here / "ca.crt"),
            "--ssl-certfile", str(here / "server.crt"),
            "--ssl-keyfile", str(here / "server.key"),
            "--enable-supernode-auth",
            "--database", str(here / "state.db"),
            "--disable-runtime-dependency-installation",
        ]  # fmt: skip

    def supernode(self, number: int, server: str, port: int, folder: Path | None = None) -> list[str]:
        """The command that starts a client's side; `port`: for its own processes, on its own loopback."""
        here = folder or self.client(number)
        return [
            "python", "-m", "qupel.flower.supernode", str(here),
            "--superlink", server,
            "--root-certificates", str(here / "ca.crt"),
            "--auth-supernode-private-key", str(here / "key"),
            "--host", LOOPBACK,
            "--port", str(port),
            "--node-config", f"config={json.dumps(str(here / 'client.toml'))}",
        ]  # fmt: skip


def flower_environment(home: Path) -> dict[str, str]:
    """Of every Flower process: no telemetry, no looking for updates, nothing installed at run time, its own home."""
    return {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    }


def init(
    folder: Path, clients: int, host: str, port: int, config: Config, venv: str, modules: Path | None = None
) -> Federation:
    """Write everything; nothing is started. modules: where the config's own are; clients of a try-out allow them, to
    others it is only said what they could allow."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)  # keys are in it
    federation = Federation(folder.resolve(), host, port, clients)
    app = folder / "app"
    app.mkdir()
    write_atomic(app / "pyproject.toml", templates.APP)
    write_atomic(app / "LICENSE", "MIT\n")
    known = bundle(folder)
    _server(federation, venv)
    for number in range(clients):
        _client(federation, number, client_text(number, config, modules if is_here(host) else None), venv)
        write_atomic(federation.client(number) / "app.sha256", known + "\n")
    introduce(federation)
    described: dict[str, Any] = asdict(federation)
    del described["folder"]
    write_json(folder / "federation.json", described)  # last: a folder that has it is whole
    return federation


def bundle(folder: Path) -> str:
    """Make DIR/app.fab of DIR/app, if it is not there; its hash. It is made once: other versions pack otherwise."""
    from flwr.cli.build import build_fab_from_disk

    path = folder / "app.fab"
    if not path.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower uses
            write_atomic(path, build_fab_from_disk(folder / "app"))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def introduce(federation: Federation) -> None:
    """Give every client whose folder is still here the public keys of all: then it knows who signs (`peers`)."""
    keys = {path.stem: path.read_text() for path in sorted((federation.server / "keys").glob("*.pub"))}
    peers.write(federation.server / peers.PEERS, keys)
    for number in range(federation.clients):
        if federation.client(number).is_dir():
            peers.write(federation.client(number) / peers.PEERS, keys)


def server_names(host: str) -> list[str]:
    """What the server's certificate is for."""
    return sorted({host, LOOPBACK, "localhost"})


def _server(federation: Federation, venv: str) -> None:
    here = federation.server
    (here / "keys").mkdir(parents=True)
    authority, key = make_authority()
    certificate, server_key = make_certificate(authority, key, server_names(federation.host))
    write_secret(here / "ca.key", private_pem(key))
    write_secret(here / "server.key", private_pem(server_key))
    write_atomic(here / "ca.crt", certificate_pem(authority))
    write_atomic(here / "server.crt", certificate_pem(certificate))
    command = federation.superlink(templates.INNER_PORT)
    _start_file(here, command, venv)
    unit = {
        "what": "the federation's folder without clients/",
        "place": "/srv/qupel",
        "start": "/srv/qupel/server/start.sh",
    }
    write_atomic(here / "qupel-superlink.service", templates.UNIT.format(name="superlink", venv=venv, **unit))
    names_ = {"host": federation.host, "port": federation.port, "inner": templates.INNER_PORT, "here": here}
    write_atomic(here / "nginx.conf", templates.NGINX.format(**names_))


def _client(federation: Federation, number: int, settings: str, venv: str) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    here = federation.client(number)
    here.mkdir(parents=True)
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    write_secret(here / "key", private)
    write_atomic(here / "key.pub", public + b"\n")
    write_atomic(federation.server / "keys" / f"client-{number}.pub", public + b"\n")
    write_atomic(here / "ca.crt", federation.authority.read_bytes())
    write_atomic(here / "client.toml", settings)
    command = federation.supernode(number, f"{federation.host}:{federation.port}", 9094)
    _start_file(here, command, venv)
    unit = {"what": "this folder", "place": f"/srv/qupel/{here.name}", "start": f"/srv/qupel/{here.name}/start.sh"}
    write_atomic(here / "qupel-supernode.service", templates.UNIT.format(name=here.name, venv=venv, **unit))


def _start_file(here: Path, command: list[str], venv: str) -> None:
    """start.sh, for its own folder, wherever it is copied to."""
    moved = [part.replace(str(here), "$HERE") for part in command]
    shown = " ".join(_quoted(part) for part in moved).replace(" --", " \\\n  --")
    env = flower_environment(here / "home")
    exports = "\n".join(f"export {k}={v.replace(str(here), '$HERE')}" for k, v in env.items())
    write_atomic(here / "start.sh", templates.START.format(exports=exports, command=shown, venv=venv))
    os.chmod(here / "start.sh", 0o755)


def _quoted(part: str) -> str:
    """For a shell, with $HERE left to it."""
    if "$HERE" not in part:
        return shlex.quote(part)
    return '"' + part.replace('"', '\\"') + '"'


def is_here(host: str) -> bool:
    """A try-out: clients reach the server on this machine only."""
    return host in {LOOPBACK, "localhost", "::1"}


def client_text(number: int, config: Config, modules: Path | None = None) -> str:
    """client.toml of a try-out: this client's share of the config's data, and its entry of the config's bits. It allows
    what the config names from a folder of this machine; otherwise it only says what could be allowed."""
    from qupel.flower.task import named_modules

    bits = config.bits
    if bits == "auto":
        budgets = config.budgets()
        size = f'budget = "{budgets[number % len(budgets)]}"'
    else:
        each = (bits,) if isinstance(bits, int) else tuple(bits)
        size = f"bits = {each[number % len(each)]}"
    known = config.model.networks
    given = known[number % len(known)] if known else ""
    network = "" if isinstance(given, str) else given.name
    chosen = config.model.layers if isinstance(given, str) else given.layers
    layers = "" if chosen is None else f"layers = {json.dumps(list(chosen))}\n"
    if known:
        shown = given if isinstance(given, str) else given.model_dump(mode="json", exclude={"layers"})
        layers = f"network = {_toml(shown)}\n" + layers
    layers += 'levels = "channel"\n' if config.model.levels == "channel" else ""
    data = {
        k: v for k, v in config.data.model_dump(mode="json").items() if v not in (None, {}, "auto") and k != "augment"
    }
    split = {k: v for k, v in config.split.model_dump(mode="json").items() if v is not None}
    tables = [f"[{name}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in table.items())
              for name, table in (("data", data), ("split", split))]  # fmt: skip
    named, own = named_modules(config), ""
    if named or ":" in f"{config.data.name}{network or given}":
        text = templates.ELSEWHERE if modules is None else templates.TRY_OUT
        own = text.format(allow=_toml(named), folder=_toml(str(modules)))
    return templates.CLIENT.format(number=number, size=size, layers=layers, own=own, data=tables[0], split=tables[1])


def _toml(value: Any) -> str:
    """A value of a config as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


# --- certificates ---


def make_authority(
    key: ec.EllipticCurvePrivateKey | None = None,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Of a new key, or again of its old one: then what it has signed is valid under both certificates."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = key or ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "QuPeL federation")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates, no more
    draft = _draft(name, name, key.public_key())
    draft = draft.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    draft = draft.add_extension(usage, critical=True)
    return _sign(draft, key, key.public_key()), key


def make_certificate(
    authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, names: list[str]
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A server certificate for these names and addresses."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0][:64])])
    draft = _draft(subject, authority.subject, key.public_key())
    draft = draft.add_extension(x509.SubjectAlternativeName([_name(n) for n in names]), critical=False)
    draft = draft.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    return _sign(draft, authority_key, authority_key.public_key()), key


def _name(text: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _draft(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _sign(
    draft: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, issuer: ec.EllipticCurvePublicKey
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    known = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer)
    return draft.add_extension(known, critical=False).sign(key, hashes.SHA384())


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def certificate_pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return certificate.public_bytes(form.Encoding.PEM)


def replace_secret(path: Path, data: bytes) -> None:
    """A new secret in place of the old one, in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    write_secret(temporary, data)
    temporary.replace(path)
    sync_folder(path.parent)


def write_secret(path: Path, data: bytes) -> None:
    """A file that only its owner can read, from its first moment."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
