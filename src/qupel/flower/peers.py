"""Whom a client knows: FOLDER/key signs for it, FOLDER/peers has every client's public key, a line each.

    client-3 ecdsa-sha2-nistp384 AAAA...

`qupel flower init` writes both. What a server says of other clients counts only if it is signed by a key of this file:
it can leave clients out, but not invent any. Owners who do not trust whoever ran `init` make keys themselves
(ssh-keygen -t ecdsa -b 384) and give each other these lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qupel.util.errors import UserError
from qupel.util.files import write_atomic

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

    from qupel.flower.secagg import Sign, Verify

KEY, PEERS = "key", "peers"


def signer(folder: Path) -> Sign:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key((folder / KEY).read_bytes(), None)
    except (OSError, ValueError) as e:
        raise UserError(f"{folder / KEY}: no key to sign with: {e}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{folder / KEY} is no ECDSA key; `qupel flower init` makes the right ones")
    return lambda text: key.sign(text, ec.ECDSA(hashes.SHA384()))


def verifier(folder: Path) -> Verify:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    known = read(folder / PEERS)

    def verify(client: int, text: bytes, signature: bytes) -> bool:
        if client not in known:
            return False
        try:
            known[client].verify(signature, text, ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            return False
        return True

    return verify


def read(path: Path) -> dict[int, ec.EllipticCurvePublicKey]:
    """client -> its public key."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        raise UserError(f"{path} is missing: the public keys of all clients; `qupel flower renew` makes it") from None
    found: dict[int, ec.EllipticCurvePublicKey] = {}
    for number, line in enumerate(lines, 1):
        named = re.fullmatch(r"client-(\d{1,9}) (ecdsa-sha2-nistp\d+ \S+).*", line)
        try:
            key = load_ssh_public_key(named[2].encode()) if named else None
        except ValueError:
            key = None
        if not named or not isinstance(key, ec.EllipticCurvePublicKey) or int(named[1]) in found:
            raise UserError(f"{path}, line {number}: expected `client-3 ecdsa-sha2-nistp384 AAAA...`, each client once")
        if any(key == other for other in found.values()):
            raise UserError(f"{path}, line {number}: one key for two clients")
        found[int(named[1])] = key
    return found


def write(path: Path, keys: Mapping[str, str]) -> None:
    """name -> public key as OpenSSH writes it."""
    write_atomic(path, "".join(f"{name} {' '.join(keys[name].split()[:2])}\n" for name in sorted(keys)))
