"""Secure aggregation: a server learns the sum of its clients' integer vectors, and nothing else of them.

Bonawitz et al., CCS 2017, on the sparse graph of Bell et al., CCS 2020 (SecAgg+). With F a stream of AES-256-CTR, of
which every key is used once, all numbers modulo 2^(8 width), and N(i) the neighbours of client i and i itself:

advertise   i makes X25519 keys (c_i to seal, s_i to mask) and a seed b_i; tells the public ones and a hash of b_i,
            signed with its key in the federation
share       k_ij = HKDF(s_i s_j). i splits b_i and the secret s_i among N(i), t shares needed; each is sealed for its
            holder (AES-GCM, c_i c_j) and relayed by the server
mask        y_i = x_i + F(b_i) + sum_{j > i} F(k_ij) - sum_{j < i} F(k_ij), j in N(i) among those that shared
open        of every j in N(i): its share of b_j if j has masked, else of s_j; never of both
then        sum x_i = sum y_i - sum F(b_i) -+ F(k_ij) of those that shared and did not mask

`Party` is a client of one such round, `Sums` the server; what they give and take is bytes, who carries it is not their
business. Each does a stage once, in this order. Below a threshold a party refuses and the server gives up (`GivenUp`):
a sum is opened as a whole or not at all. What this protects, and against whom: docs/secure.md.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from qupel.flower import shares
from qupel.flower.shares import SHARE
from qupel.util.errors import UserError

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Sign = Callable[[bytes], bytes]  # with a client's own key in the federation
Verify = Callable[[int, bytes, bytes], bool]  # whether client's key has signed these bytes: (client, bytes, signature)
LEAST = 3  # clients in a sum: of two, each knows the other's vector
SEED, KEY = b"seed", b"key"  # what a share that is opened is of
_ADVERT = struct.Struct("!32s32s32s")  # public c, public s, hash of b
_ENTRY = struct.Struct("!II")  # client, bytes


class Refused(UserError):
    """What a party does not do, and why."""


class TooFew(Refused):
    """A sum of too few clients."""


class GivenUp(Exception):
    """Too few are left: this sum is never opened."""


@dataclass(frozen=True)
class Rules:
    """What a round is, in public. All parties sign its hash: a server cannot tell them different ones."""

    session: str  # the job, the round, which attempt: no two sums share it
    size: int  # numbers of a vector
    bits: int  # of a number: it is within +-(2^(bits-1) - 1)
    width: int  # bytes it travels in
    threshold: float = 2 / 3  # t is more than this share of N(i)

    def __post_init__(self) -> None:
        if not (0.5 <= self.threshold < 1 and self.size >= 1 and 2 <= self.bits <= 32 and 1 <= self.width <= 8):
            raise Refused(f"rules of a sum that are not sound: {self}")

    @property
    def most(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def needed(self, members: int) -> int:
        """t: shares that open a secret of a client with so many members in N(i). Over a half, so that those who open
        b_i and those who open s_i cannot both be enough; over two thirds, not even if a third of them lie."""
        return math.floor(self.threshold * members + 1e-9) + 1

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


def width_of(bits: int, clients: int) -> int:
    """Bytes in which a sum over so many clients fits, with its sign."""
    return -(-(bits + math.ceil(math.log2(max(2, clients)))) // 8)


def neighbours(clients: Sequence[int], most: int) -> dict[int, list[int]]:
    """The graph: all with all, or where they are more than `most` + 1, each with the `most` (even) nearest on a ring in
    an order that nobody could foresee."""
    if len(clients) <= most + 1:
        return {i: [j for j in clients if j != i] for i in clients}
    ring, half = list(clients), most // 2
    secrets.SystemRandom().shuffle(ring)
    near = [step for step in range(-half, half + 1) if step]
    return {i: sorted(ring[(at + step) % len(ring)] for step in near) for at, i in enumerate(ring)}


# --- what both sides compute ---


def stream(key: bytes, rules: Rules) -> Words:
    """F(key): (size,) numbers, uniform modulo 2^(8 width)."""
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()  # one key, one stream: no nonce is needed
    return widened(cipher.update(bytes(rules.size * rules.width)), rules)


def widened(body: bytes, rules: Rules) -> Words:
    words = np.zeros((rules.size, 8), np.uint8)
    words[:, : rules.width] = np.frombuffer(body, np.uint8).reshape(rules.size, rules.width)
    return words.view("<u8").reshape(-1)


def narrowed(words: Words, rules: Rules) -> bytes:
    """Modulo 2^(8 width), which is all that a mask covers."""
    return words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : rules.width].tobytes()


def derived(secret: bytes, what: bytes, rules: bytes, first: int, second: int) -> bytes:
    info = b"qupel secure sum 1 " + what + rules + _ENTRY.pack(first, second)
    return HKDF(hashes.SHA256(), 32, None, info).derive(secret)


def pair_mask(own: X25519PrivateKey, client: int, other: int, public: bytes, rules: Rules) -> Words:
    """What `client` adds for a pair; the other one adds its negative."""
    agreed = own.exchange(X25519PublicKey.from_public_bytes(public))
    mask = stream(derived(agreed, b"mask", rules.digest, min(client, other), max(client, other)), rules)
    return mask if client < other else np.negative(mask)


def self_mask(seed: bytes, client: int, rules: Rules) -> Words:
    return stream(derived(seed, b"self", rules.digest, client, client), rules)


def committed(seed: bytes, rules: Rules) -> bytes:
    return hashlib.sha256(b"qupel secure sum 1 seed" + rules.digest + seed).digest()


def signed_text(client: int, advert: bytes, rules: Rules) -> bytes:
    return b"qupel secure sum 1 keys" + rules.digest + _ENTRY.pack(client, 0) + advert


def is_signed(client: int, advert: bytes, rules: Rules, verify: Verify) -> bool:
    """Whether these keys are a client's own, for this sum."""
    keys, signature = advert[: _ADVERT.size], advert[_ADVERT.size :]
    return len(keys) == _ADVERT.size and verify(client, signed_text(client, keys, rules), signature)


def is_usable(advert: bytes) -> bool:
    """Whether others can agree on secrets with these keys: with a point of small order nobody can."""
    if len(advert) < _ADVERT.size:
        return False
    own = X25519PrivateKey.generate()
    try:
        for public in (advert[:32], advert[32:64]):
            own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def pack(table: Mapping[int, bytes]) -> bytes:
    """client -> bytes, as bytes."""
    return b"".join(_ENTRY.pack(client, len(table[client])) + table[client] for client in sorted(table))


def unpack(body: bytes) -> dict[int, bytes]:
    """What `pack` was given; raises ValueError for anything that it does not make."""
    table: dict[int, bytes] = {}
    at = 0
    while at < len(body):
        if len(body) - at < _ENTRY.size:
            raise ValueError("a table that ends early")
        client, size = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        if size > len(body) - at or client <= max(table, default=-1):
            raise ValueError("a table that is damaged")
        table[client] = body[at : at + size]
        at += size
    return table


# --- a client ---


class Party:
    """One client of one sum. least: fewer clients it does not help to add up, as far as it can see: those of N(i)."""

    def __init__(self, rules: Rules, client: int, sign: Sign, verify: Verify, least: int = LEAST) -> None:
        self.rules, self.client, self.sign, self.verify = rules, client, sign, verify
        self.least = max(LEAST, least)
        self.stage = 0
        self.adverts: dict[int, bytes] = {}  # of its neighbours
        self.agreed: dict[int, bytes] = {}  # with each of them, to seal shares
        self.held: dict[int, tuple[bytes, bytes]] = {}  # client -> shares of its seed and of its key

    def advertise(self) -> bytes:
        self._enter(1)
        self.seal_key, self.mask_key, self.seed = X25519PrivateKey.generate(), X25519PrivateKey.generate(), _random()
        public = (key.public_key().public_bytes_raw() for key in (self.seal_key, self.mask_key))
        advert = _ADVERT.pack(*public, committed(self.seed, self.rules))
        return advert + self.sign(signed_text(self.client, advert, self.rules))

    def share(self, adverts: Mapping[int, bytes]) -> dict[int, bytes]:
        """Its neighbours' adverts -> for each of them its shares of this client's secrets, sealed."""
        self._enter(2)
        self._enough(len(adverts) + 1, 1)
        for other, advert in adverts.items():
            if other == self.client or not is_signed(other, advert, self.rules, self.verify):
                raise Refused(f"keys of client {other} which that client has not signed for this sum")
            self.adverts[other] = advert[: _ADVERT.size]
        members = [self.client, *self.adverts]
        self.needed = self.rules.needed(len(members))
        secret = self.mask_key.private_bytes_raw()
        split = [shares.split(s, self.needed, members) for s in (self.seed, secret)]
        self.held[self.client] = split[0][self.client], split[1][self.client]
        return {other: self._seal(other, split[0][other] + split[1][other]) for other in self.adverts}

    def mask(self, x: Integers, sealed: Mapping[int, bytes]) -> bytes:
        """Its vector (size,), masked; sealed: what its neighbours shared with it."""
        self._enter(3)
        if not set(sealed) <= set(self.adverts):
            raise Refused("shares of a client that is no neighbour")
        self._enough(len(sealed) + 1, self.needed)
        if x.shape != (self.rules.size,) or int(np.abs(x).max()) > self.rules.most:
            raise ValueError(f"{self.rules.size} integers up to {self.rules.most} are needed")
        total = x.astype(np.uint64) + self_mask(self.seed, self.client, self.rules)
        for other, box in sealed.items():
            opened = self._unseal(other, box)
            self.held[other] = opened[:SHARE], opened[SHARE:]
            total += pair_mask(self.mask_key, self.client, other, self.adverts[other][32:64], self.rules)
        return narrowed(total, self.rules)

    def open(self, masked: Collection[int]) -> dict[int, bytes]:
        """Those of N(i) whose masked vectors are in the sum -> a share of each member's seed or key."""
        self._enter(4)
        if not set(masked) <= set(self.held) or self.client not in masked:
            raise Refused("a sum of clients that this one has not masked with")
        self._enough(len(set(masked)), self.needed)
        return {j: SEED + held[0] if j in masked else KEY + held[1] for j, held in self.held.items()}

    def _enter(self, stage: int) -> None:
        if stage != self.stage + 1:
            raise Refused("a stage of a sum out of its order, or once more")
        self.stage = stage

    def _enough(self, members: int, needed: int) -> None:
        if members < max(needed, self.least):
            raise TooFew(f"a sum of {members} clients; at least {max(needed, self.least)} are needed")

    def _box(self, giver: int, holder: int) -> AESGCM:
        other = holder if giver == self.client else giver
        if other not in self.agreed:
            public = X25519PublicKey.from_public_bytes(self.adverts[other][:32])
            self.agreed[other] = self.seal_key.exchange(public)
        return AESGCM(derived(self.agreed[other], b"seal", self.rules.digest, giver, holder))

    def _seal(self, other: int, plain: bytes) -> bytes:
        return self._box(self.client, other).encrypt(bytes(12), plain, None)  # this key seals this once

    def _unseal(self, other: int, box: bytes) -> bytes:
        try:
            plain = self._box(other, self.client).decrypt(bytes(12), box, None)
        except InvalidTag:
            raise Refused(f"shares of client {other} that it has not sealed for this one") from None
        if len(plain) != 2 * SHARE:
            raise Refused(f"shares of client {other} of a wrong length")
        return plain


def _random() -> bytes:
    return secrets.token_bytes(32)


# --- the server ---


@dataclass
class Sums:
    """The server's side of one sum. Each step takes what came from whom and says what goes to whom."""

    rules: Rules
    least: int = LEAST  # clients in the sum
    most_neighbours: int = 100
    adverts: dict[int, bytes] = field(default_factory=dict)
    graph: dict[int, list[int]] = field(default_factory=dict)
    paired: dict[int, list[int]] = field(default_factory=dict)  # i -> its neighbours that shared, too
    masked: list[int] = field(default_factory=list)
    total: Words | None = None

    def introduce(self, adverts: Mapping[int, bytes]) -> dict[int, dict[int, bytes]]:
        """To each client its neighbours' adverts."""
        self._enough(len(adverts))
        self.adverts = dict(adverts)
        self.graph = neighbours(sorted(adverts), self.most_neighbours)
        return {i: {j: self.adverts[j] for j in others} for i, others in self.graph.items()}

    def relay(self, sealed: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """To each client what was sealed for it. One whose secrets too few hold is left out from here on: if it went
        missing, nobody could take its masks off."""
        paired = {i: [j for j in self.graph[i] if j in sealed and i in sealed[j] and j in sealed[i]] for i in sealed}
        while lost := [i for i in paired if len(paired[i]) + 1 < self._needed(i)]:
            paired = {i: [j for j in others if j not in lost] for i, others in paired.items() if i not in lost}
        self._enough(len(paired))
        self.paired = paired
        return {i: {j: sealed[j][i] for j in others} for i, others in paired.items()}

    def add(self, client: int, body: bytes) -> None:
        """One masked vector more."""
        if client not in self.paired or client in self.masked or len(body) != self.rules.size * self.rules.width:
            raise ValueError(f"a masked vector of {len(body)} bytes; {self.rules.size * self.rules.width} are needed")
        words = widened(body, self.rules)
        self.total = words if self.total is None else self.total + words
        self.masked.append(client)

    def ask(self) -> dict[int, list[int]]:
        """To each client that masked, who of N(i) did. Nobody is asked where it is clear that too few can answer."""
        self._enough(len(self.masked))
        here = set(self.masked)
        for i in self._secrets():
            if len([j for j in (i, *self.paired[i]) if j in here]) < self._needed(i):
                raise GivenUp(f"too few neighbours of client {i} are left")
        return {i: [j for j in (i, *self.paired[i]) if j in here] for i in sorted(here)}

    def finish(self, opened: Mapping[int, Mapping[int, bytes]]) -> Integers:
        """The sum (size,), signed; opened: client -> whose secret -> its share."""
        assert self.total is not None
        total, here = self.total, set(self.masked)
        found = {
            i: self._secret(i, SEED if i in here else KEY, opened) for i in self._secrets()
        }  # all, or none is used
        for i, secret in found.items():
            if i in here:
                total = total - self_mask(secret, i, self.rules)
                continue
            key = X25519PrivateKey.from_private_bytes(secret)
            for j in set(self.paired[i]) & here:  # j has added its mask for the pair: the negative of i's
                total = total + pair_mask(key, i, j, self.adverts[j][32:64], self.rules)
        return self._signed(total)

    def _secrets(self) -> list[int]:
        """Those whose secret is needed: who masked, and who is in the masks of these."""
        here = set(self.masked)
        return [i for i in sorted(self.paired) if i in here or here & set(self.paired[i])]

    def _secret(self, client: int, kind: bytes, opened: Mapping[int, Mapping[int, bytes]]) -> bytes:
        needed = self._needed(client)
        told = {j: opened[j].get(client, b"") for j in (client, *self.paired[client]) if j in opened}
        right = {j: s[len(kind) :] for j, s in told.items() if s.startswith(kind) and len(s) == len(kind) + SHARE}
        if len(right) < needed:
            raise GivenUp(f"{len(right)} shares of client {client}'s secret, {needed} are needed")
        secret = shares.combine({j: right[j] for j in sorted(right)[:needed]})
        advert, known = self.adverts[client], None
        if secret is not None and kind == SEED:
            known = hmac.compare_digest(committed(secret, self.rules), advert[64:96])
        elif secret is not None:
            known = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == advert[32:64]
        if secret is None or not known:
            raise GivenUp(f"wrong shares of client {client}'s secret")
        return secret

    def _signed(self, total: Words) -> Integers:
        beyond = np.uint64(64 - 8 * self.rules.width)
        signed = (total << beyond).view(np.int64) >> np.int64(beyond)
        if int(np.abs(signed).max()) > len(self.masked) * self.rules.most:
            raise GivenUp("a sum out of its range: somebody has masked wrongly")
        return signed

    def _needed(self, client: int) -> int:
        return self.rules.needed(len(self.graph[client]) + 1)

    def _enough(self, clients: int) -> None:
        if clients < max(LEAST, self.least):
            raise GivenUp(f"{clients} clients are left, {max(LEAST, self.least)} are needed")
