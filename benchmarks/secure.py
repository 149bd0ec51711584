"""What secure aggregation costs a round, with the post in this process: CPU seconds and bytes a client, and the server.

    python benchmarks/secure.py [--clients 20 100 1000] [--numbers 100000] [--bits 16] [--neighbours 100] [--drop 0.05]
                                [--out FILE.json]

One thread; keys as on Flower (ECDSA, P-384). Clients are timed one by one, as if each had its own machine; `drop` of
them mask nothing after they have shared. The sum is compared with the plain one. 1,000 clients take some ten minutes.
--out docs/results/secure.json puts it beside what `experiments/secure.py` has measured.
"""

import argparse
import json
import math
import os
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from scipy.stats import hypergeom

from qupel.flower.secagg import Party, Rules, Sums, pack, width_of
from qupel.util.files import write_json

T = TypeVar("T")
SHA = ec.ECDSA(hashes.SHA384())
DROPS = (0.05, 0.1, 0.15, 0.2, 0.3)


class Clock:
    """CPU seconds by name and client: what else the machine does hardly counts."""

    def __init__(self) -> None:
        self.spent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))

    def time(self, name: str, client: int, act: Callable[[], T]) -> T:
        begin = time.process_time()
        done = act()
        self.spent[name][client] += time.process_time() - begin
        return done

    def median(self, name: str) -> float:
        return statistics.median(self.spent[name].values())


def measure(count: int, numbers: int, bits: int, neighbours: int, drop: float) -> dict[str, Any]:
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(count)]
    public = [key.public_key() for key in keys]

    def verify(client: int, text: bytes, signature: bytes) -> bool:
        try:
            public[client].verify(signature, text, SHA)
        except InvalidSignature:
            return False
        return True

    rules = Rules(secrets.token_hex(8), numbers, bits, width_of(bits, count))
    rng, clock = np.random.default_rng(0), Clock()
    vectors = rng.integers(-rules.most, rules.most, (count, numbers), endpoint=True)
    gone = set(rng.choice(count, int(drop * count), replace=False).tolist())
    parties = [Party(rules, i, lambda text, key=key: key.sign(text, SHA), verify) for i, key in enumerate(keys)]
    server, sent, got = Sums(rules, 3, neighbours), defaultdict(int), defaultdict(int)

    def note(table: dict[int, dict[int, bytes]]) -> dict[int, dict[int, bytes]]:
        for i, part in table.items():
            got[i] += len(pack(part))
        return table

    adverts = {i: clock.time("client", i, parties[i].advertise) for i in range(count)}
    told = note(clock.time("server", 0, lambda: server.introduce(adverts)))
    sealed = {i: clock.time("client", i, lambda i=i: parties[i].share(told[i])) for i in told}
    boxes = note(clock.time("server", 0, lambda: server.relay(sealed)))
    for i in boxes:
        if i in gone:
            continue
        body = clock.time("client", i, lambda i=i: parties[i].mask(vectors[i], boxes[i]))
        clock.time("server", 0, lambda i=i, body=body: server.add(i, body))
        sent[i] += len(body)
    asked = clock.time("server", 0, server.ask)
    opened = {i: clock.time("client", i, lambda i=i: parties[i].open(asked[i])) for i in asked}
    for i in asked:
        sent[i] += len(adverts[i]) + len(pack(sealed[i])) + len(pack(opened[i]))
        got[i] += len(pack(dict.fromkeys(asked[i], b"")))
    total = clock.time("server", 0, lambda: server.finish(opened))
    assert np.array_equal(total, vectors[sorted(server.masked)].sum(0))
    size = 4 * numbers
    return {
        "clients": count,
        "neighbours": min(count - 1, neighbours),
        "drop": len(gone),
        "client_seconds": clock.median("client"),
        "server_seconds": clock.spent["server"][0],
        "sent": statistics.median(sent.values()) / size,
        "got": statistics.median(got.values()) / size,
        "lost": [lost(count, neighbours, share) for share in DROPS],
    }


def lost(count: int, neighbours: int, drop: float, threshold: float = 2 / 3) -> float:
    """The chance, at most, that some client's neighbours are too few at the end: then a round is given up."""
    members = min(count, neighbours + 1)
    spare = members - (math.floor(threshold * members + 1e-9) + 1)  # members that may be gone
    return min(1.0, count * float(hypergeom.sf(spare, count, int(drop * count), members)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--numbers", type=int, default=100_000)
    parser.add_argument("--bits", type=int, default=16, choices=[16, 32])
    parser.add_argument("--neighbours", type=int, default=100)
    parser.add_argument("--drop", type=float, default=0.05)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(f"{given.numbers:,} numbers of {given.bits} bits, load {os.getloadavg()[0]:.1f}; bytes against fp32's")
    rows = []
    for count in given.clients:
        rows.append(measure(count, given.numbers, given.bits, given.neighbours, given.drop))
        print(json.dumps(rows[-1]), flush=True)
    if given.out:
        found = json.loads(given.out.read_text()) if given.out.exists() else {}
        found["post"] = {"numbers": given.numbers, "bits": given.bits, "drops": DROPS, "rows": rows}
        write_json(given.out, found)


if __name__ == "__main__":
    main()
