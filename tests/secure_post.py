"""Secure sums in this process: who drops out when, and all that the server sees."""

from collections.abc import Collection, Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qupel.flower.secagg import LEAST, Party, Rules, Sums

STAGES = ("advertise", "share", "mask", "open")


class Keys:
    """Keys of a federation. A real one's are ECDSA keys (`flower.peers`), which take ten times as long."""

    def __init__(self, count: int) -> None:
        self.own = [Ed25519PrivateKey.generate() for _ in range(count)]
        self.public = [key.public_key() for key in self.own]

    def sign(self, client: int):
        return self.own[client].sign

    def verify(self, client: int, text: bytes, signature: bytes) -> bool:
        try:
            self.public[client].verify(signature, text)
        except (InvalidSignature, IndexError):
            return False
        return True


def summed(
    rules: Rules,
    vectors,
    keys: Keys,
    gone: Mapping[str, Collection[int]] | None = None,
    least: int = LEAST,
    most: int = 100,
    seen: dict | None = None,
):
    """(the sum, who is in it). gone: stage -> clients that are gone from it on; seen: what the server got."""
    count, gone, seen = len(vectors), gone or {}, {} if seen is None else seen
    parties = [Party(rules, i, keys.sign(i), keys.verify) for i in range(count)]
    server = Sums(rules, least, most)

    def left(clients, stage):
        out = {i for s in STAGES[: STAGES.index(stage) + 1] for i in gone.get(s, ())}
        return [i for i in clients if i not in out]

    seen["advertise"] = {i: parties[i].advertise() for i in left(range(count), "advertise")}
    told = server.introduce(seen["advertise"])
    seen["share"] = {i: parties[i].share(told[i]) for i in left(told, "share")}
    boxes = server.relay(seen["share"])
    seen["mask"] = {i: parties[i].mask(vectors[i], boxes[i]) for i in left(boxes, "mask")}
    for i, body in seen["mask"].items():
        server.add(i, body)
    asked = server.ask()
    seen["open"] = {i: parties[i].open(asked[i]) for i in left(asked, "open")}
    return server.finish(seen["open"]), sorted(server.masked)
