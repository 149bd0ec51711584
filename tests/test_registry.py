"""Parts by name: how they are registered, found, built from a config's tables and described again, and what is said
about mistakes. The round trips run over every registered part; nothing here lists them."""

import json
import sys
import textwrap
from dataclasses import dataclass, is_dataclass
from datetime import date

import pytest

from qupel.core.optim import SGD, Adam
from qupel.core.schedule import Follow, Schedule, Travel
from qupel.parts.codecs import codecs
from qupel.parts.methods import methods
from qupel.parts.methods.ditto import Ditto
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import Phase, phase_from
from qupel.parts.quantizers import quantizers
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.prox import Prox
from qupel.parts.servers import servers
from qupel.parts.servers.fedavgm import FedAvgM
from qupel.util.errors import UserError
from qupel.util.registry import REGISTRIES, Registry
from toy import every, examples, name

PARTS = [methods, quantizers, servers, codecs]


@pytest.fixture
def shelf():
    """A registry of this test alone."""
    yield Registry("thing")
    del REGISTRIES["thing"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of the user's onto the path and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def write(source: str) -> str:
        made.append(f"users_own_{len(made)}")
        (tmp_path / f"{made[-1]}.py").write_text(textwrap.dedent(source))
        return made[-1]

    yield write
    for each in made:
        sys.modules.pop(each, None)


@dataclass(frozen=True)
class Thing:
    """A thing of the tests. And more about it."""

    size: int = 1
    weight: float = 0.5


OWN_QUANTIZER = """
    from dataclasses import dataclass
    from qupel.core.schedule import Schedule

    @dataclass(frozen=True)
    class Mine:
        '''A quantizer of the user's.'''
        strength: Schedule = Schedule(0.5)
        deep: bool = False

        class Inner:
            pass
"""


# --- registering ---


def test_a_part_registers_itself_where_it_is_written(shelf):
    @shelf.register("round", paper="Euclid")
    @dataclass(frozen=True)
    class Round:
        """A round one.

        Rounder than others."""

    assert shelf["round"] is Round
    assert list(shelf) == ["round"]
    assert "round" in shelf
    assert "square" not in shelf
    entry = shelf.all()["round"]
    assert (entry.name, entry.paper, entry.about) == ("round", "Euclid", "A round one.")
    assert shelf.name_of(Round) == shelf.name_of(Round()) == "round"


def test_about_may_be_given(shelf):
    shelf.register("thing", about="one of many")(Thing)
    assert shelf.all()["thing"].about == "one of many"


def test_a_name_is_given_once(shelf, module):
    shelf.register("thing")(Thing)
    other = module("class Thing: pass")
    with pytest.raises(UserError, match=r"thing 'thing' is there already, from test_registry"):
        shelf.register("thing")(getattr(__import__(other), "Thing"))  # noqa: B009
    assert shelf["thing"] is Thing
    shelf.register("thing")(Thing)  # a module that is loaded again


def test_two_parts_of_one_file_cannot_share_a_name(shelf):
    shelf.register("thing")(Thing)
    with pytest.raises(UserError, match="is there already"):
        shelf.register("thing")(dataclass(frozen=True)(type("Other", (), {"__module__": __name__})))
    assert shelf["thing"] is Thing


@pytest.mark.parametrize("registry", PARTS, ids=lambda r: r.kind)
def test_every_part_says_what_it_is(registry):
    assert len(registry.all()) >= 2
    for entry in registry.all().values():
        assert entry.about, entry.name
        assert len(entry.about) <= 120
        assert registry.name_of(entry.part) == entry.name
        assert registry[entry.name] is entry.part
        params = entry.part.__dataclass_params__
        assert params.frozen, entry.name


# --- finding ---


@pytest.mark.parametrize(
    ("registry", "wrong", "near"),
    [
        (methods, "qupl", "qupel"),
        (methods, "fedavgg", "fedavg"),
        (quantizers, "proxquan", "proxquant"),
        (servers, "avgm", "fedavgm"),
        (codecs, "int9", "int8"),
    ],
    ids=["method", "method2", "quantizer", "server", "codec"],
)
def test_unknown_names_are_answered_with_near_ones(registry, wrong, near):
    with pytest.raises(UserError) as e:
        registry[wrong]
    said = str(e.value)
    assert said.startswith(f"unknown {registry.kind} {wrong!r} (did you mean ")
    assert near in said.split("?")[0]
    assert all(known in said for known in registry)
    assert '"module:Name" of your own' in said


def test_a_name_far_from_all_has_no_suggestion(shelf):
    shelf.register("thing")(Thing)
    with pytest.raises(UserError, match=r"^unknown thing 'xyz'; allowed: thing, or"):
        shelf["xyz"]


def test_an_import_path_is_a_name(module):
    path = f"{module(OWN_QUANTIZER)}:Mine"
    part = quantizers[path]
    assert part.__name__ == "Mine"
    assert quantizers.name_of(part) == quantizers.name_of(part()) == path
    assert quantizers[f"{path}.Inner"] is part.Inner
    assert path not in quantizers


def test_a_part_of_the_users_goes_wherever_a_built_in_one_does(module):
    path = f"{module(OWN_QUANTIZER)}:Mine"
    made = methods.build({"name": "local", "quantizer": {"name": path, "strength": 2}}, "phases[0]")
    assert made.quantizer == quantizers[path](Schedule(2.0))
    described = json.loads(json.dumps(methods.describe(made)))
    assert described["quantizer"]["name"] == path
    assert methods.build(described, "again") == made
    assert methods.build({"name": "local", "quantizer": path}, "x").quantizer == quantizers[path]()


@pytest.mark.parametrize(
    ("source", "path", "said"),
    [
        ("", "no_such_module_at_all:X", "no module 'no_such_module_at_all' on the Python path"),
        ("", "{}:Missing", "{} has no 'Missing'"),
        ("1 / 0", "{}:X", "{} fails to load: ZeroDivisionError: division by zero"),
        ("import no_such_thing", "{}:X", "no module 'no_such_thing' on the Python path"),
        ("def broken(:", "{}:X", "{} fails to load: SyntaxError"),
    ],
    ids=["no module", "no name", "raises", "its own import", "syntax"],
)
def test_import_paths_that_lead_nowhere(module, source, path, said):
    name = module(source)
    with pytest.raises(UserError) as e:
        methods[path.format(name)]
    assert str(e.value).startswith(f"method {path.format(name)!r}: ")
    assert said.format(name) in str(e.value)
    assert "\n" not in str(e.value)


def test_installed_packages_offer_parts_by_entry_points(shelf, module, tmp_path):
    """A real distribution on the path: its metadata and its module."""
    own = module("class Offered:\n    '''Offered by a package.'''\n")
    info = tmp_path / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[qupel.thing]\noffered = {own}:Offered\nthing = {own}:Offered\n")
    shelf.register("thing")(Thing)
    assert list(shelf) == ["thing", "offered"]
    assert shelf["thing"] is Thing  # what is built in wins
    assert shelf["offered"].__name__ == "Offered"
    assert shelf.all()["offered"].about == "Offered by a package."
    assert shelf.name_of(shelf["offered"]) == "offered"


# --- building and describing ---


def described(registry, part):
    """Through JSON, as configs, summaries and messages carry it."""
    return json.loads(json.dumps(registry.describe(part)))


ALL = [(registry, entry.part) for registry in list(REGISTRIES.values()) for entry in registry.all().values()]
BUILT = [pair for pair in ALL if is_dataclass(pair[1]) and isinstance(pair[1], type)]


@pytest.mark.parametrize(("registry", "cls"), BUILT, ids=[f"{r.kind}-{r.name_of(c)}" for r, c in BUILT])
def test_what_is_described_is_built_again(registry, cls):
    """The defaults, and every setting at other values of its type, parts in parts included."""
    for part in examples(cls):
        table = described(registry, part)
        again = registry.build(table, "here")
        assert again == part
        assert type(again) is cls
        assert described(registry, again) == table
        assert table["name"] == registry.name_of(cls)


@pytest.mark.parametrize(("registry", "cls"), BUILT, ids=[f"{r.kind}-{r.name_of(c)}" for r, c in BUILT])
def test_a_wrong_setting_of_any_part_is_refused_with_its_path(registry, cls):
    known = registry.name_of(cls)
    with pytest.raises(UserError, match=r"^a\.b: unknown key 'no_such_setting'"):
        registry.build({**described(registry, examples(cls)[0]), "no_such_setting": 1}, "a.b")
    for key in described(registry, examples(cls)[0]):
        if key != "name":
            with pytest.raises(UserError) as e:
                registry.build({"name": known, key: ["nonsense", {}]}, "a.b")
            assert str(e.value).startswith(f"a.b.{key}"), str(e.value)
            assert "\n" not in str(e.value)


@pytest.mark.parametrize("method", every(methods), ids=name)
@pytest.mark.parametrize("server", every(servers), ids=name)
def test_a_phase_is_its_table(method, server):
    phase = Phase(method, 7, server)
    table = json.loads(json.dumps(phase.table()))
    assert (table["rounds"], table["method"]) == (7, methods.name_of(method))
    assert phase_from(table, "phases[0]") == phase
    assert ("server" in table) == (server != Phase(method, 7).server)


def test_short_ways_to_say_it():
    """A name for a part, a number for a constant schedule, a list for a tuple, a whole number for a float."""
    made = methods.build(
        {
            "name": "qupel",
            "eta1": 0.25,
            "lambda_p": {"start": 1, "drops": [2, 5]},
            "optimizer": {"name": "adam", "beta1": 0},
            "quantizer": {"name": "prox", "lam": {"travel": 2}, "lam_c": {"follow": 0.5}, "eta2": 3, "P": 4},
            "enters": "free",
        },
        "phases[0]",
    )
    prox = Prox(lam=Travel(2.0), lam_c=Follow(0.5), eta2=Schedule(3.0), P=4.0)
    expected = QuPeL(
        eta1=Schedule(0.25),
        lambda_p=Schedule(1.0, drops=(2, 5)),
        optimizer=Adam(beta1=0.0),
        quantizer=prox,
        enters="free",
    )
    assert made == expected
    assert methods.build("ditto", "x") == Ditto()
    assert methods.build(made, "x") is made
    assert methods.build({"name": "local", "quantizer": "frozen"}, "x").quantizer == Frozen()
    assert methods.build({"name": "local", "optimizer": {"momentum": 0.9}}, "x").optimizer == SGD(momentum=0.9)
    assert methods.build({"name": "local", "optimizer": "adam"}, "x").optimizer == Adam()
    with pytest.raises(UserError, match=r"x.optimizer: .*'adagrad'"):
        methods.build({"name": "local", "optimizer": "adagrad"}, "x")


WRONG = {
    "no name": ({"eta1": 0.1}, "p[0]: a name is missing; allowed: "),
    "name of another type": ({"name": 3}, "p[0]: a name is missing"),
    "unknown": ({"name": "qupl"}, "p[0]: unknown method 'qupl' (did you mean qupel"),
    "unknown key": ({"name": "qupel", "lambda": 1}, "p[0]: unknown key 'lambda'; did you mean 'lambda_p'"),
    "wrong type": ({"name": "qupel", "eta1": "fast"}, "p[0].eta1: "),
    "a date, as TOML has them": ({"name": "qupel", "coupling": date(2021, 7, 1)}, "p[0].coupling: "),
    "not a flag": ({"name": "qupel", "as_printed": 1}, "p[0].as_printed: "),
    "not allowed": ({"name": "qupel", "enters": "some"}, "p[0].enters: "),
    "in a schedule": ({"name": "qupel", "eta1": {"start": "x"}}, "p[0].eta1.start: "),
    "schedule key": ({"name": "qupel", "eta1": {"strat": 1}}, "p[0].eta1: unknown key 'strat'; did you mean 'start'"),
    "drop": ({"name": "qupel", "eta1": {"start": 1, "drops": [1.5]}}, "p[0].eta1.drops"),
    "part": ({"name": "qupel", "quantizer": "proxx"}, "p[0].quantizer: unknown quantizer 'proxx' (did you mean prox"),
    "key of the usual part": ({"name": "qupel", "quantizer": {"lamm": 1}}, "p[0].quantizer: unknown key 'lamm'"),
    "part's key": (
        {"name": "qupel", "quantizer": {"name": "prox", "eta": 1}},
        "p[0].quantizer: unknown key 'eta'; did you mean 'eta2'",
    ),
    "part's value": ({"name": "qupel", "quantizer": {"name": "prox", "mode": "warm"}}, "p[0].quantizer.mode: "),
    "deep": (
        {"name": "qupel", "quantizer": {"name": "prox", "lam": {"travel": "far"}}},
        "p[0].quantizer.lam.travel: ",
    ),
    "optimizer's key": (
        {"name": "qupel", "optimizer": {"name": "sgd", "momentun": 0.9}},
        "p[0].optimizer: unknown key 'momentun'; did you mean 'momentum'",
    ),
    "optimizer's value": (
        {"name": "qupel", "optimizer": {"name": "sgd", "weight_decay": "some"}},
        "p[0].optimizer.weight_decay: ",
    ),
    "optimizer's name": ({"name": "qupel", "optimizer": {"name": "sdg"}}, "p[0].optimizer.name: "),
}


@pytest.mark.parametrize(("table", "said"), WRONG.values(), ids=WRONG)
def test_errors_say_where_and_what(table, said):
    with pytest.raises(UserError) as e:
        methods.build(table, "p[0]")
    assert str(e.value).startswith(said)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (3, "p: a table is needed, not 3"),
        ({"method": "local"}, "p.rounds: a whole number from 0 on is needed, not None"),
        ({"method": "local", "rounds": -1}, "p.rounds: a whole number"),
        ({"method": "local", "rounds": True}, "p.rounds: a whole number"),
        ({"method": "local", "rounds": 2.0}, "p.rounds: a whole number"),
        ({"rounds": 1}, "p: a name is missing"),
        ({"method": "local", "rounds": 1, "server": "men"}, "p.server: unknown server 'men' (did you mean mean"),
        ({"method": "local", "rounds": 1, "server": {"name": "fedavgm", "momentum": "x"}}, "p.server.momentum: "),
        ({"method": "local", "rounds": 1, "eta": 2}, "p: unknown key 'eta'"),
    ],
)
def test_errors_in_phases(table, said):
    with pytest.raises(UserError) as e:
        phase_from(table, "p")
    assert str(e.value).startswith(said)


def test_a_phase_with_a_server_of_its_own():
    phase = phase_from({"method": "fedavg", "rounds": 0, "server": {"name": "fedavgm", "nesterov": True}}, "p")
    assert phase.server == FedAvgM(nesterov=True)


def test_a_setting_without_default_is_asked_for(shelf):
    @shelf.register("needy")
    @dataclass(frozen=True)
    class Needy:
        bound: float
        size: int
        extra: int = 1

        def __post_init__(self):
            if self.bound < 0:
                raise ValueError("bound must not be negative")

    with pytest.raises(UserError, match=r"^here: missing: size$"):
        shelf.build({"name": "needy", "bound": 1.0, "extra": 2}, "here")
    with pytest.raises(UserError, match=r"^here: bound must not be negative$"):
        shelf.build({"name": "needy", "bound": -1.0, "size": 2}, "here")
    assert shelf.build({"name": "needy", "bound": 1, "size": 2}, "here") == Needy(1.0, 2)


def test_what_is_no_dataclass_has_no_settings(shelf):
    shelf.register("plain")(str.upper)
    with pytest.raises(UserError, match=r"^here: plain is no frozen dataclass"):
        shelf.build("plain", "here")
