"""Who is trusted, later: certificates that come to their end, keys that are let in no more.

DIR/server/revoked/   public keys of clients that are shut out; those in DIR/server/keys are let in
"""

from __future__ import annotations

import datetime
from pathlib import Path

from qupel.flower.control import Control
from qupel.flower.folder import (
    Federation,
    bundle,
    certificate_pem,
    introduce,
    make_authority,
    make_certificate,
    private_pem,
    replace_secret,
    server_names,
)
from qupel.util.errors import UserError
from qupel.util.files import sync_folder, write_atomic

WARN_DAYS = 30


def ends(path: Path) -> datetime.datetime:
    """Until when a certificate is valid."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as e:
        raise UserError(f"{path} is no certificate: {e}") from None


def days_left(federation: Federation) -> float:
    """Of the certificate that ends first: the authority's or the server's."""
    now = datetime.datetime.now(datetime.UTC)
    first = min(ends(federation.authority), ends(federation.server / "server.crt"))
    return (first - now) / datetime.timedelta(days=1)


def warning(federation: Federation) -> str | None:
    """What there is to say about the certificates. Raises when they are not valid any more."""
    left, remedy = days_left(federation), f"`qupel flower renew {federation.folder}`"
    if left <= 0:
        raise UserError(f"the certificates of {federation.folder} have expired; make new ones with {remedy}")
    if left < WARN_DAYS:
        return f"the certificates of {federation.folder} expire in {left:.0f} days; make new ones with {remedy}"
    return None


def renew(federation: Federation) -> datetime.datetime:
    """New certificates for the authority, with its old key, and for the server, with a new one; until when the old
    authority's was valid: so long clients that have only that one are served."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    here, before = federation.server, ends(federation.authority)
    key = load_pem_private_key((here / "ca.key").read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{here / 'ca.key'} is not a key that `qupel flower init` makes")
    authority, _ = make_authority(key)
    certificate, server_key = make_certificate(authority, key, server_names(federation.host))
    replace_secret(here / "server.key", private_pem(server_key))
    write_atomic(here / "server.crt", certificate_pem(certificate))
    write_atomic(here / "ca.crt", certificate_pem(authority))
    known = bundle(federation.folder)
    for number in range(federation.clients):
        if (there := federation.client(number)).is_dir():
            write_atomic(there / "ca.crt", certificate_pem(authority))
            write_atomic(there / "app.sha256", known + "\n")
    introduce(federation)
    return before


def revoke(federation: Federation, name: str) -> None:
    """Shut a client out, for good: its key is not let in again. Durable before any server hears of it."""
    key = federation.server / "keys" / f"{name}.pub"
    if name in federation.revoked():
        return
    if not key.exists():
        here = ", ".join(sorted(path.stem for path in key.parent.glob("*.pub")))
        raise UserError(f"no client {name!r}; those let in are {here}")
    there = federation.server / "revoked"
    there.mkdir(exist_ok=True)
    key.replace(there / key.name)
    sync_folder(there)
    sync_folder(key.parent)


def admit(federation: Federation, control: Control) -> None:
    """Register the clients' keys, each under its client's name; those that are known stay, the revoked ones go."""
    known = {node.name for node in control.nodes()}
    for path in sorted((federation.server / "keys").glob("*.pub")):
        if path.stem not in known:
            control.register(path, path.stem)
    shut_out(federation, control)


def shut_out(federation: Federation, control: Control) -> None:
    """Unregister revoked clients: a SuperLink refuses them from then on, also those that are connected."""
    for node in control.nodes():
        if node.name in federation.revoked() and node.status != "unregistered":
            control.unregister(node)
