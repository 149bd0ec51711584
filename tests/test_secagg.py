"""Secure aggregation: what is opened is the plain sum of integers, whoever drops out; else nothing is."""

import contextlib
import itertools

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qupel.flower import secagg, shares
from qupel.flower.secagg import GivenUp, Party, Refused, Rules, Sums, neighbours, pack, unpack, width_of
from secure_post import STAGES, Keys, summed

COUNT, SIZE = 20, 50
KEYS = Keys(COUNT)


def rules(session="job/0", count=COUNT, bits=16, size=SIZE, **more):
    return Rules(session, size, bits, width_of(bits, count), **more)


def made(count=COUNT, bits=16, size=SIZE, seed=0):
    most = 2 ** (bits - 1) - 1
    return np.random.default_rng(seed).integers(-most, most, (count, size), endpoint=True)


# --- sharing ---


def test_the_modulus_is_prime_and_above_every_secret():
    assert sympy.isprime(shares.PRIME)
    assert shares.PRIME > 2 ** (8 * shares.SECRET)


@settings(deadline=None, max_examples=40)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 7), st.integers(0, 4), st.randoms())
def test_as_many_shares_as_needed_give_the_secret(secret, threshold, more, random):
    holders = random.sample(range(1000), threshold + more)
    split = shares.split(secret, threshold, holders)
    some = random.sample(holders, threshold)
    assert shares.combine({j: split[j] for j in some}) == secret
    assert {len(share) for share in split.values()} == {shares.SHARE}


def test_fewer_shares_fit_every_secret():
    """With t - 1 shares and any secret at all, a last share can be found that makes them whole: they tell nothing."""
    split = shares.split(bytes(range(32)), 3, [4, 7, 9])
    some = {4: split[4], 7: split[7]}
    weights = shares._weights((4, 7, 9))
    known = weights[0] * int.from_bytes(split[4]) + weights[1] * int.from_bytes(split[7])
    for other in (bytes(32), b"\xff" * 32, bytes(reversed(range(32)))):
        last = (int.from_bytes(other) - known) * pow(weights[2], -1, shares.PRIME) % shares.PRIME
        assert shares.combine({**some, 9: last.to_bytes(shares.SHARE)}) == other
    assert shares.combine(some) != bytes(range(32))


def test_what_cannot_be_split_is_an_error():
    for secret, threshold, holders in [
        (b"short", 1, [0]),
        (bytes(32), 3, [0, 1]),
        (bytes(32), 2, [0, 0]),
        (bytes(32), 1, [-1]),
    ]:
        with pytest.raises(ValueError, match="holders"):
            shares.split(secret, threshold, holders)


# --- the sum ---


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("out", "bits"), [(0, 32), (1, 16), (6, 16), (6, 32)])
def test_the_plain_sum_bit_for_bit_whoever_drops_out(out, bits, stage):
    """0, 1 and 30 % of 20 clients, at each stage."""
    vectors, gone = made(bits=bits), np.random.default_rng(out).choice(COUNT, out, replace=False).tolist()
    found, who = summed(rules(bits=bits), vectors, KEYS, {stage: gone}, least=14)
    late = stage == "open"  # who has masked is in the sum, even if it is gone when that is opened
    assert who == [i for i in range(COUNT) if late or i not in gone]
    assert found.tobytes() == vectors[who].sum(0).tobytes()


def test_one_at_each_stage_and_the_extremes_of_the_range():
    most = 2**15 - 1
    vectors = np.stack([np.full(SIZE, most if i % 2 else most - 1) for i in range(COUNT)]) * np.array([1, -1] * 25)
    found, who = summed(rules(), vectors, KEYS, {stage: [k] for k, stage in enumerate(STAGES)})
    assert np.array_equal(found, vectors[who].sum(0))
    assert who == list(range(3, COUNT))


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_nothing_is_opened(stage):
    """Seven of 20 are gone: 13 are left, and t is 14."""
    seen = {}
    with pytest.raises((GivenUp, Refused)):
        summed(rules(), made(), KEYS, {stage: range(7)}, least=14, seen=seen)
    if stage != "open":
        assert "open" not in seen  # nobody was even asked
    else:  # 13 have opened what they may: of each secret a share fewer than tell anything
        assert len(seen["open"]) == 13


def test_the_clients_refuse_where_the_server_would_go_on(monkeypatch):
    monkeypatch.setattr(Sums, "_enough", lambda *_: None)
    monkeypatch.setattr(Sums, "_needed", lambda *_: 1)
    with pytest.raises(Refused, match="a sum of 2 clients; at least 3 are needed"):
        summed(rules(), made(2), KEYS)
    with pytest.raises(Refused, match="a sum of 13 clients; at least 14 are needed"):
        summed(rules(), made(), KEYS, {"mask": range(7)})


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_sparse_graph_gives_the_same_sum(stage):
    """36 clients with 12 neighbours each; on a ring, three that are gone leave each ten of thirteen."""
    count, keys = 36, Keys(36)
    vectors = made(count)
    found, who = summed(rules(count=count), vectors, keys, {stage: [3, 4, 30]}, most=12)
    assert len(who) == (36 if stage == "open" else 33)
    assert found.tobytes() == vectors[who].sum(0).tobytes()


def test_the_graph_is_regular_symmetric_and_connected():
    for count, most in [(5, 100), (101, 100), (102, 100), (300, 8)]:
        graph = neighbours(range(count), most)
        assert {len(set(others) - {i}) for i, others in graph.items()} == {min(most, count - 1)}
        assert all(i in graph[j] for i in graph for j in graph[i])
        reached, left = {0}, [0]
        while left:
            new = set(graph[left.pop()]) - reached
            reached |= new
            left += new
        assert len(reached) == count
    assert neighbours(range(300), 8) != neighbours(range(300), 8)


def test_a_client_whose_secrets_too_few_hold_is_left_out_and_the_sum_goes_on(monkeypatch):
    """On a sparse graph the neighbours of one client may be those that are gone: here 0 has two neighbours fewer."""
    count = 12
    graph = {i: [j for j in range(count) if j != i] for i in range(1, count)}
    graph |= {0: [1, 2, 3]} | {i: [j for j in graph[i] if j] for i in range(4, count)}
    monkeypatch.setattr(secagg, "neighbours", lambda clients, most: graph)
    vectors = made(count)
    found, who = summed(rules(count=count), vectors, KEYS, {"share": [1, 2]})
    assert who == list(range(3, count))
    assert np.array_equal(found, vectors[who].sum(0))


def test_widths():
    assert [width_of(16, n) for n in (2, 20, 256, 257, 1000)] == [3, 3, 3, 4, 4]
    assert [width_of(32, n) for n in (3, 1000)] == [5, 6]
    for n, bits in itertools.product((3, 255, 256, 257, 65536), (16, 32)):
        assert n * (2 ** (bits - 1) - 1) < 2 ** (8 * width_of(bits, n) - 1)


# --- a curious server ---


def test_what_the_server_receives_is_uniform_and_new_in_every_run():
    """The same vectors, all zero but for one number, in two runs that the server gives one name: each byte is uniform
    (chi-square), and between the runs every bit position differs, in half of the numbers."""
    count, size = 5, 4000
    vectors, runs = np.zeros((count, size), np.int64), []
    vectors[:, 0] = 7
    for _ in range(2):
        seen = {}
        found, _ = summed(rules("job/0", count, size=size), vectors, KEYS, seen=seen)
        assert found[0] == 7 * count
        assert not found[1:].any()
        runs.append({i: np.frombuffer(body, np.uint8) for i, body in seen["mask"].items()})
    bodies = [body for run in runs for body in run.values()]
    for body in [*bodies, runs[0][0] - runs[0][1], runs[0][0] ^ runs[1][0]]:
        assert stats.chisquare(np.bincount(body, minlength=256)).pvalue > 1e-6
    for i in range(count):
        changed = np.unpackbits((runs[0][i] ^ runs[1][i]).reshape(size, 3), axis=1)  # (size, 24 bit positions)
        share = changed.mean(0)
        assert (abs(share - 0.5) < 6 * 0.5 / np.sqrt(size)).all()
    without = sum(np.int64(1) * secagg.widened(runs[0][i].tobytes(), rules("", count, size=size)) for i in range(count))
    assert without.astype(np.uint64)[0] % 2**24 != 7 * count  # the self masks are on


def test_with_the_self_masks_off_a_vector_is_still_covered():
    """The server opens every b_i: what is left of one client are masks that it shares with others, and what is left of
    all but one is no sum."""
    count, size = 5, 4000
    r, seen = rules(count=count, size=size), {}
    vectors = np.zeros((count, size), np.int64)
    summed(r, vectors, KEYS, seen=seen)
    bare = []
    for i in range(count):
        told = {j: seen["open"][j][i][len(secagg.SEED) :] for j in range(r.needed(count))}
        seed = shares.combine(told)
        bare.append(secagg.widened(seen["mask"][i], r) - secagg.self_mask(seed, i, r))
    for rest in (*bare, sum(bare[:4])):
        counts = np.bincount(np.frombuffer(secagg.narrowed(rest, r), np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-6
    assert secagg.narrowed(sum(bare), r) == bytes(size * r.width)


def test_masks_are_of_one_sum():
    """The same secret gives other masks in another session, for another pair, and for another use."""
    used = [
        (b"mask", "a", 0, 1),
        (b"mask", "b", 0, 1),
        (b"mask", "a", 0, 2),
        (b"seal", "a", 0, 1),
        (b"seal", "a", 1, 0),
    ]
    made_of = {secagg.derived(bytes(32), what, rules(s).digest, i, j) for what, s, i, j in used}
    assert len(made_of) == len(used)


def test_colluding_clients_below_the_threshold_learn_no_seed():
    """Server and 13 of 20 clients put all together that they hold; the 14th would do."""
    parties = [Party(rules(), i, KEYS.sign(i), KEYS.verify) for i in range(COUNT)]
    server = Sums(rules())
    told = server.introduce({p.client: p.advertise() for p in parties})
    boxes = server.relay({i: parties[i].share(told[i]) for i in told})
    for i in told:
        parties[i].mask(made()[i], boxes[i])
    held = {j: parties[j].held[19][0] for j in range(14)}
    assert shares.combine({j: held[j] for j in range(13)}) != parties[19].seed
    assert shares.combine(held) == parties[19].seed


# --- a server, or a client, that lies ---


def begun(count=5, upto="mask", session="job/0", keys=KEYS):
    """Parties, and what they were given, just before a stage."""
    r = rules(session, count)
    parties = [Party(r, i, keys.sign(i), keys.verify) for i in range(count)]
    server = Sums(r)
    told = server.introduce({p.client: p.advertise() for p in parties})
    if upto == "share":
        return parties, told, server
    boxes = server.relay({i: parties[i].share(told[i]) for i in told})
    if upto == "mask":
        return parties, boxes, server
    for i in told:
        server.add(i, parties[i].mask(made(count)[i], boxes[i]))
    return parties, server.ask(), server


def test_a_server_cannot_invent_clients():
    parties, told, _ = begun(upto="share")
    invented = Keys(5)
    advert = Party(rules(count=5), 4, invented.sign(4), invented.verify).advertise()
    with pytest.raises(Refused, match="keys of client 4 which that client has not signed for this sum"):
        parties[0].share({**told[0], 4: advert})
    with pytest.raises(Refused, match="client 77"):
        parties[1].share({**told[1], 77: advert})
    with pytest.raises(Refused, match="client 2 "):  # its own advert, as a neighbour's
        parties[2].share({**told[2], 2: told[0][2]})


def test_keys_of_another_sum_or_other_rules_are_refused():
    parties, told, _ = begun(upto="share")
    _, other, _ = begun(upto="share", session="job/1")
    with pytest.raises(Refused, match="has not signed for this sum"):
        parties[0].share({**told[0], 1: other[0][1]})
    weaker = Party(rules(count=5, threshold=0.5), 0, KEYS.sign(0), KEYS.verify)
    weaker.advertise()
    with pytest.raises(Refused, match="has not signed for this sum"):
        weaker.share(told[0])


def test_shares_that_the_server_changes_or_swaps_are_refused():
    for change in (lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b"", lambda b: bytes(len(b))):
        parties, boxes, _ = begun()
        with pytest.raises(Refused, match="has not sealed for this one"):
            parties[0].mask(made()[0], {**boxes[0], 1: change(boxes[0][1])})
    parties, boxes, _ = begun()
    with pytest.raises(Refused, match="shares of client 1"):
        parties[0].mask(made()[0], {**boxes[0], 1: boxes[0][2]})
    with pytest.raises(Refused, match="no neighbour"):
        begun()[0][0].mask(made()[0], {**boxes[0], 9: b""})


def test_never_both_secrets_of_a_client():
    """Each stage once: a second set of survivors is not answered, and one answer has one share of each."""
    parties, asked, _ = begun(upto="open")
    opened = parties[0].open(asked[0])
    assert [share[:1] for share in opened.values()] == [b"s"] * 5
    with pytest.raises(Refused, match="once more"):
        parties[0].open([0, 1, 2, 3])
    other = parties[1].open([1, 2, 3, 4])
    assert {j: share.startswith(b"key") for j, share in other.items()} == {
        0: True,
        1: False,
        2: False,
        3: False,
        4: False,
    }


def test_a_sum_without_oneself_or_with_strangers_is_not_opened():
    for masked in ([1, 2, 3, 4], [0, 1, 2, 3, 9], [0, 1, 2], [0, 1], [0, 0, 0, 0, 0]):
        parties, _, _ = begun(upto="open")
        with pytest.raises(Refused):
            parties[0].open(masked)


def test_stages_out_of_order_are_refused():
    party = Party(rules(), 0, KEYS.sign(0), KEYS.verify)
    for act in (lambda: party.share({}), lambda: party.mask(made()[0], {}), lambda: party.open([0])):
        with pytest.raises(Refused, match="out of its order"):
            act()
    party.advertise()
    with pytest.raises(Refused, match="once more"):
        party.advertise()


def test_rules_that_are_not_sound_are_refused():
    for wrong in ({"threshold": 0.3}, {"threshold": 1.0}, {"bits": 64}, {"size": 0}):
        with pytest.raises(Refused, match="not sound"):
            rules(**wrong) if "bits" not in wrong else Rules("s", 5, 64, 8)


def test_thresholds():
    assert [Rules("s", 1, 16, 3).needed(n) for n in (3, 4, 20, 101)] == [3, 3, 14, 68]
    for share, n in itertools.product((0.5, 0.6, 2 / 3, 0.9), range(1, 200)):
        assert 2 * Rules("s", 1, 16, 3, share).needed(n) > n


def test_a_client_that_lies_when_a_sum_is_opened_stops_it():
    parties, asked, server = begun(upto="open")
    opened = {i: parties[i].open(asked[i]) for i in asked}
    wrong = {**opened, 0: {j: share[:-1] + bytes([share[-1] ^ 1]) for j, share in opened[0].items()}}
    with pytest.raises(GivenUp, match="wrong shares of client 0"):
        server.finish(wrong)
    keyed = {i: {j: b"key" + share[4:] for j, share in told.items()} for i, told in opened.items()}
    with pytest.raises(GivenUp, match="0 shares of client 0's secret, 4 are needed"):
        server.finish(keyed)
    assert np.array_equal(server.finish(opened), made(5).sum(0))


def test_a_client_that_masks_wrongly_is_noticed():
    r = rules(count=5, size=1000)
    parties = [Party(r, i, KEYS.sign(i), KEYS.verify) for i in range(5)]
    server = Sums(r)
    told = server.introduce({p.client: p.advertise() for p in parties})
    boxes = server.relay({i: parties[i].share(told[i]) for i in told})
    for i in told:
        body = parties[i].mask(made(5, size=1000)[i], boxes[i])
        server.add(i, bytes(len(body)) if i == 3 else body)
    with pytest.raises(GivenUp, match="out of its range"):
        server.finish({i: parties[i].open(a) for i, a in server.ask().items()})


def test_masked_vectors_are_taken_once_and_in_one_length():
    parties, boxes, server = begun()
    body = parties[0].mask(made(5)[0], boxes[0])
    server.add(0, body)
    for client, wrong in [(0, body), (9, body), (1, body[:-1]), (1, body + b"0")]:
        with pytest.raises(ValueError, match="a masked vector of"):
            server.add(client, wrong)
    for x in (np.full(SIZE, 2**15), np.zeros(SIZE + 1, np.int64)):
        with pytest.raises(ValueError, match="integers up to"):
            parties[1].mask(x, boxes[1])
        parties[1].stage = 2


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.integers(0, 2**32 - 1), st.binary(max_size=40), max_size=6), st.binary(max_size=60))
def test_tables_travel_and_anything_else_is_an_error(table, junk):
    assert unpack(pack(table)) == table
    with contextlib.suppress(ValueError):
        assert pack(unpack(junk)) == junk
