"""Configs: strict, explained in one line; presets are the paper's numbers."""

import math
import re
from itertools import groupby
from pathlib import Path

import pytest

from qupel.core.optim import SGD, Adam
from qupel.core.schedule import Follow, Schedule, Travel
from qupel.parts.methods.base import quantizer_of
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.hedged import Hedged
from qupel.parts.methods.local import Local
from qupel.parts.methods.qupel import QuPeL
from qupel.parts.phase import phase_from
from qupel.parts.quantizers.frozen import Frozen
from qupel.parts.quantizers.lsq import LSQ
from qupel.parts.quantizers.prox import Prox
from qupel.parts.quantizers.proxquant import ProxQuant
from qupel.parts.servers.fedavgm import FedAvgM
from qupel.parts.servers.mean import Mean
from qupel.run import config as configs
from qupel.run import experiment
from qupel.run.recipes import find, recipes
from qupel.run.settings import Length, Settings
from qupel.util.errors import UserError

BASE = '[methods.QuPeL]\nrecipe = "qupel"\n'
PHASE = "[[methods.A.phases]]\n"


def parse(*overrides, text=BASE, **options):
    return configs.parse(text, "file.toml", overrides, **options)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("nothing=1", "nothing: unknown key 'nothing'"),
        ("round=3", "unknown key 'round'; did you mean 'rounds'"),
        ("eta1=0.1", "unknown key 'eta1'; it belongs in [settings] or in a method"),
        ("methods.QuPeL.etta1=1", "methods.QuPeL.etta1: unknown key 'etta1'; did you mean 'eta1'"),
        ("settings.foo=1", "unknown key 'foo'"),
        ("split.kinds='iid'", "split.kinds: unknown key 'kinds'; did you mean 'kind'"),
        ("bits=0", "bits: input should be greater than or equal to 1, not 0"),
        ("bits=9", "bits = 9: allowed are 1 to 8, and 32"),
        ("bits=[2, 31]", "bits = 31: allowed"),
        ("bits=[]", "bits: at least one"),
        ("bits=2.5", "bits: input should be a valid integer, not 2.5"),
        ("bits=true", "bits: input should be a valid integer, not True"),
        ("bits='two'", "bits: "),
        ("methods.QuPeL.bits=9", "methods.QuPeL.bits: bits = 9: allowed"),
        ("methods.QuPeL.bits=[]", "methods.QuPeL.bits: at least one"),
        ("rounds=0", "rounds: input should be greater than or equal to 1, not 0"),
        ("rounds='3'", "rounds: input should be a valid integer, not '3'"),
        ("rounds=3.5", "rounds: input should be a valid integer, not 3.5"),
        ("sample=0", "sample: input should be greater than 0, not 0"),
        ("sample=1.5", "sample: input should be less than or equal to 1, not 1.5"),
        ("sample=nan", "sample: "),
        ("weighted=1", "weighted: input should be a valid boolean, not 1"),
        ("seeds=3", "seeds: input should be a valid array, not 3"),
        ("seeds=[]", "seeds: at least one"),
        ("split=3", "split: input should be an object, not 3"),
        ("split.kind='random'", "split.kind: input should be 'classes', 'dirichlet', 'iid', 'groups' or 'one'"),
        ("split.alpha=0", "split.alpha: input should be greater than 0"),
        ("split.validation=1", "split.validation: input should be less than 1"),
        ("model.name='alexnet'", "model.name: unknown model 'alexnet'; allowed: mlp, "),
        ("methods=3", "methods: a table is needed, not 3"),
        ("settings=3", "settings: a table is needed, not 3"),
        ("methods.QuPeL=3", "methods.QuPeL: input should be an object, not 3"),
        (
            "methods.QuPeL.recipe='qupl'",
            "methods.QuPeL.recipe: unknown recipe 'qupl' (did you mean qupel or quped?); allowed: qupel, ",
        ),
        ("methods.QuPeL.recipe=[]", "methods.QuPeL.recipe: input should be a valid string"),
        ("methods.QuPeL.eta1=0", "methods.QuPeL.eta1: input should be greater than 0, not 0"),
        ("methods.QuPeL.eta1='fast'", "methods.QuPeL.eta1: input should be a valid number, not 'fast'"),
        ("methods.QuPeL.eta1=inf", "methods.QuPeL.eta1: input should be a finite number, not inf"),
        ("methods.QuPeL.eta1=nan", "methods.QuPeL.eta1: "),
        ("methods.QuPeL.mode='firm'", "methods.QuPeL.mode: input should be 'hard' or 'soft', not 'firm'"),
        ("methods.QuPeL.phases=3", "methods.QuPeL.phases: a list of tables is needed, not 3"),
        ("model.name.x=3", "model.name"),
        ("bits='auto'", 'bits = "auto" needs a budget'),
        ("on_bad_upload='ignore'", "on_bad_upload: input should be 'refuse' or 'stop'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(override, says):
    with pytest.raises(UserError) as error:
        parse(override)
    assert says in str(error.value)
    assert str(error.value).startswith("file.toml: ")
    assert "\n" not in str(error.value)
    assert "constrained" not in str(error.value)


@pytest.mark.parametrize("override", ["rounds", "model.name", ""])
def test_set_needs_key_and_value(override):
    with pytest.raises(UserError, match="expected key=value"):
        parse(override)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rounds = [", "is not TOML"),
        ("", "methods: missing"),
        ("methods = {}", "methods: at least one"),
        (f'{PHASE}rounds = 2\nmethod = "sgd"', "methods.A.phases: phase 1: unknown method 'sgd'; allowed: "),
        (f'{PHASE}rounds = 2\nmethod = "fedavgg"', "unknown method 'fedavgg' (did you mean fedavg"),
        (f"{PHASE}rounds = 2", "methods.A.phases: phase 1: a name is missing; allowed: "),
        (f'{PHASE}method = "qupel"', "methods.A.phases: phase 1.rounds: a whole number from 0 on is needed, not None"),
        (f'{PHASE}rounds = -1\nmethod = "qupel"', "phase 1.rounds: a whole number from 0 on is needed, not -1"),
        (f'{PHASE}rounds = 2.5\nmethod = "qupel"', "phase 1.rounds: a whole number from 0 on is needed, not 2.5"),
        (f'{PHASE}rounds = true\nmethod = "qupel"', "phase 1.rounds: a whole number from 0 on is needed, not True"),
        (
            f'{PHASE}rounds = 2\nmethod = "local"\nquantizer = {{name = "prox", lamm = 3}}',
            "phase 1.quantizer: unknown key 'lamm'; did you mean 'lam'",
        ),
        (f'{PHASE}rounds = 2\nmethod = "local"\nquantizer = {{lam = []}}', "phase 1.quantizer.lam: input should be "),
        (f'{PHASE}rounds = 2\nmethod = "local"\nquantizer = "lsqq"', "phase 1.quantizer: unknown quantizer 'lsqq'"),
        (f'{PHASE}rounds = 2\nmethod = "local"\nserver = "meen"', "phase 1.server: unknown server 'meen' (did you"),
        (f'{PHASE}rounds = 2\nmethod = "fedavg"\nlambda_p = 3', "phase 1: unknown key 'lambda_p'"),
        (f'{PHASE}rounds = 2\nmethod = "fedavg"\neta1 = "x"', "phase 1.eta1: input should be an object, not 'x'"),
        ("[methods.A]\nphases = [3]", "methods.A.phases: phase 1: a table is needed, not 3"),
        ("[methods.A]\nphases = []", "methods.A.phases: at least one"),
        ('[methods.A]\nmethod = "dito"', "methods.A: method: unknown method 'dito' (did you mean ditto"),
        ('[methods.A]\nmethod = {name = "ditto", lamda = 1}', "methods.A: method: unknown key 'lamda'"),
        ("[methods.A]\nmethod = {eta1 = 1}", "methods.A: method: a name is missing"),
        ('[methods.A]\nmethod = "ditto"\nquantizer = "lsqq"', "methods.A: quantizer: unknown quantizer 'lsqq'"),
        ('[methods.A]\nmethod = "ditto"\nserver = {name = "fedavgm", momentun = 1}', "methods.A: server: unknown key"),
        ("[methods.A]\nmethod = 3", "methods.A.method: "),
        (
            '[methods.A]\nmethod = {name = "ditto", quantizer = "lsq"}\nquantizer = "prox"',
            "methods.A: quantizer: method ditto has one in its table",
        ),
        (
            '[methods.A]\nrecipe = "qupel"\nquantizer = "lsq"',
            "methods.A: quantizer goes with method; recipe has its own",
        ),
        (f'{PHASE}rounds = 2\nmethod = "local"\n[methods.A]\nserver = "fedavgm"', "methods.A"),
        (f'{BASE}\n[methods.B]\nof = "C"\nbits = 2', "methods.B.of = 'C': allowed are "),
        (f'{BASE}\n[methods.B]\nof = "B"\nbits = 2', "methods.B.of = 'B': allowed are "),
        ('[methods.A]\nrecipe = "fedavg"\n[methods.B]\nof = "A"', "methods.B: `of` needs bits beside it"),
        (
            '[methods.A]\nrecipe = "fedavg"\n[methods.B]\nof = "A"\nbits = 2\neta1 = 1.0',
            "methods.B: eta1: beside `of` there are bits and afterwards, nothing else",
        ),
        ('[methods.A]\nrecipe = "fedavg"\nafterwards = "kmeans"', "methods.A: afterwards goes with `of`"),
        ('[model]\nname = "nowhere:Net"\n' + BASE, "model.name: network 'nowhere:Net': no module 'nowhere'"),
        ('[model]\nlevels = "row"\n' + BASE, "model.levels: input should be 'layer' or 'channel', not 'row'"),
        ('[task]\nloss = "msee"\n' + BASE, "task.loss: unknown loss 'msee' (did you mean mse"),
        ('[task]\nmetrics = ["topp5"]\n' + BASE, "task.metrics: unknown metric 'topp5' (did you mean top5"),
    ],
)
def test_files_that_are_no_config(text, says):
    with pytest.raises(UserError) as error:
        parse(text=text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        configs.load(tmp_path / "none.toml")
    with pytest.raises(UserError, match="Is a directory"):
        configs.load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        configs.load(tmp_path / "binary.toml")


def test_set_overrides_and_makes_tables():
    config = parse("rounds=7", "split.clients=5", "model.name=mlp", "bits=[1, 32]", 'data.folder="some/where"')
    assert (config.rounds, config.split.clients, config.model.name, config.bits) == (7, 5, "mlp", (1, 32))
    assert str(config.data.folder) == "some/where"
    assert parse("methods.QuPeL.eta1=1").methods["QuPeL"].eta1 == 1.0  # an integer is a number
    assert parse("methods.QuPeL.eta2_drops=[1, 2]").methods["QuPeL"].eta2_drops == (1, 2)


def test_settings_are_shared_and_a_methods_own_win():
    text = "[settings]\neta1 = 0.3\nlambda_p = 0.7\n"
    text += '[methods.A]\nrecipe = "qupel"\n[methods.B]\nrecipe = "local"\neta1 = 0.2\n'
    config = parse(text=text)
    assert (config.methods["A"].eta1, config.methods["B"].eta1) == (0.3, 0.2)
    assert (config.methods["A"].lambda_p, config.methods["B"].lambda_p) == (0.7, 0.7)


def test_a_presets_own_settings_win_over_shared_ones():
    """[settings] tunes our recipes; the paper's preset stays the paper's unless the method itself says otherwise."""
    text = '[settings]\nlambda_p = 0.7\n[methods.P]\nrecipe = "qupel-paper"\n'
    text += '[methods.Q]\nrecipe = "qupel-paper"\nlambda_p = 0.5\n'
    config = parse(text=text)
    assert (config.methods["P"].lambda_p, config.methods["Q"].lambda_p) == (0.025, 0.5)


def test_defaults_of_a_command_give_way_to_the_file():
    config = parse("split.clients=3", defaults={"split": {"kind": "one"}, "bits": 2, "rounds": 9})
    assert (config.split.kind, config.split.clients, config.bits, config.rounds) == ("one", 3, 2, 9)
    assert parse(text="rounds = 4\n" + BASE, defaults={"rounds": 9}).rounds == 4


def test_phases_written_out():
    text = """
    [[methods.Own.phases]]
    rounds = 3
    method = "fedavg"
    eta1 = 0.05
    [[methods.Own.phases]]
    rounds = 4
    method = "qupel"
    eta1 = {start = 0.1, decay = 0.9}
    lambda_p = 1
    optimizer = {name = "adam", beta1 = 0.8}
    quantizer = {name = "prox", lam = {travel = 2.0}, lam_c = {follow = 0.1}, eta2 = 1e-3, mode = "soft"}
    server = {name = "fedavgm", momentum = 0.8}
    [[methods.Own.phases]]
    rounds = 2
    method = "local"
    quantizer = {name = "binaryrelax", lam = inf}
    """
    first, second, third = parse(text=text).methods["Own"].phases
    assert first.method == FedAvg(eta1=Schedule(0.05))
    assert first.server == Mean()
    assert second.rounds == 4
    assert second.method.eta1 == Schedule(0.1, decay=0.9)
    assert second.method.lambda_p == Schedule(1)
    assert second.method.optimizer == Adam(beta1=0.8)
    assert second.method.quantizer.lam == Travel(2.0)
    assert second.method.quantizer.eta2 == Schedule(1e-3)
    assert second.method.quantizer.lam_c == Follow(0.1)
    assert second.method.quantizer.mode == "soft"
    assert second.server == FedAvgM(momentum=0.8)
    assert isinstance(third.method, Local)
    assert third.method.quantizer.lam(1) == math.inf


def test_a_quantizer_without_a_name_is_the_methods_usual_one():
    table = {"rounds": 2, "method": "local", "quantizer": {"mode": "soft"}}
    assert phase_from(table, "phase").method.quantizer == Prox(mode="soft")


def test_the_table_of_a_phase_gives_it_again():
    for phase in (*parse(text=WRITTEN).methods["M"].phases, *(p for name in recipes for p in preset(name))):
        assert phase_from(phase.table(), "phase") == phase


def test_one_method_with_a_quantizer_and_a_server_in_place_of_a_recipe():
    """What the method's table leaves out comes from the settings."""
    text = """
    rounds = 4
    [settings]
    eta1 = 0.3
    weight_decay = 1e-3
    [methods.A]
    method = "ditto"
    quantizer = "lsq"
    server = {name = "fedavgm", momentum = 0.7}
    [methods.B]
    method = {name = "local", eta1 = 0.2, quantizer = {name = "proxquant", lam = 0.5}}
    """
    config = parse(text=text)
    (a,), (b,) = (experiment.build_job(config, cell).phases for cell in experiment.cells(config))
    assert (type(a.method).__name__, a.method.quantizer, a.server) == ("Ditto", LSQ(), FedAvgM(momentum=0.7))
    assert (a.rounds, a.method.eta1.start, a.method.optimizer) == (4, 0.3, SGD(weight_decay=1e-3, clip=4.0))
    assert a.method.eta1.cosine > 0  # over the whole run
    assert (b.method.eta1, b.method.optimizer, b.server) == (Schedule(0.2), SGD(weight_decay=1e-3, clip=4.0), Mean())
    assert b.method.quantizer == ProxQuant(lam=Schedule(0.5))


WRITTEN = """
[[methods.M.phases]]
method = "qupel"
rounds = 2
eta1 = {start = 0.1, drops = [1, 3]}
optimizer = {name = "adam", beta1 = 0.8}
quantizer = {name = "prox", lam = {travel = 0.5}, lam_c = {follow = 0.1}, eta2 = 0.01}
server = {name = "fedadam", beta1 = 0.5}
[[methods.M.phases]]
method = "local"
rounds = 1
quantizer = {name = "binaryrelax", lam = inf}
"""
COMPOSED = '[methods.M]\nmethod = {name = "ditto", eta1 = 0.2}\nquantizer = "lsq"\nserver = {name = "fedavgm"}\n'


def test_drops_of_a_phase_are_a_list():
    phase, _ = parse(text=WRITTEN).methods["M"].phases
    assert phase.method.eta1 == Schedule(0.1, drops=(1, 3))


@pytest.mark.parametrize(
    "text", [WRITTEN, COMPOSED, *(f'[methods.M]\nrecipe = "{name}"\nbits = [2, 32]\n' for name in recipes)]
)
def test_a_config_that_is_sent_is_the_same_config(text):
    """As ranks get it: equal, and with the same keys given."""
    config = parse("split.clients=3", "data.folder=somewhere", text=text)
    sent = configs.read(configs.write(config))
    assert sent == config
    assert sent.model_fields_set == config.model_fields_set
    assert sent.methods["M"].model_fields_set == config.methods["M"].model_fields_set


@pytest.mark.parametrize("page", ["README.md", "docs/configuration.md"])
def test_examples_in_the_docs_are_configs(page):
    text = (Path(__file__).parents[1] / page).read_text()
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        configs.parse(example, page)


def test_either_a_recipe_or_a_method_or_phases():
    phases = 'phases = [{rounds = 1, method = "fedavg"}]\n'
    recipe, method = 'recipe = "local"\n', 'method = "local"\n'
    for text in (recipe + phases, recipe + method, method + phases, recipe + method + phases, "eta1 = 0.1\n"):
        with pytest.raises(UserError, match=r"methods\.A: give either recipe, or method, or phases"):
            parse(text="[methods.A]\n" + text)


def test_cells():
    text = '[methods."A b"]\nrecipe = "local"\n[methods.C]\nrecipe = "local"\n'
    config = parse("seeds=[0, 7]", text=text)
    assert [c.name for c in experiment.cells(config)] == ["A-b-s0", "C-s0", "A-b-s7", "C-s7"]
    with pytest.raises(UserError, match="each once"):
        experiment.cells(parse("seeds=[1, 1]"))
    with pytest.raises(UserError, match="punctuation"):
        experiment.cells(parse(text='[methods."A b"]\nrecipe = "local"\n[methods."A-b"]\nrecipe = "local"\n'))


def test_a_job_follows_its_config():
    config = parse("split.clients=5", "split.train_per_client=8", "bits=[1, 3, 32]", "model.name=mlp", "batch=4",
                   "sample=0.5", "weighted=true", "local_steps=6")  # fmt: skip
    job = experiment.build_job(config, experiment.cells(config)[0])
    assert [list(plan.values()) for plan in job.plans] == [[2], [8], [], [2], [8]]  # 3.weight, repeated as needed
    assert [len(p.train_rows) for p in job.parts] == [8] * 5
    assert (job.batch, job.sample, job.weighted, job.local_steps, job.client_epoch_steps) == (4, 0.5, True, 6, 2)
    assert job.steps_per_epoch == pytest.approx(2 / 0.6)  # 3 of the 5 clients in a round
    assert job.rounds == config.rounds
    chosen = experiment.build_job(parse("model.layers=['1']", "model.name=mlp", "bits=2"), experiment.Cell("QuPeL", 0))
    assert set(chosen.plans[0]) == {"1.weight"}


@pytest.mark.parametrize("bits", ["2", "'auto'"])
def test_levels_scaled_by_channels(bits):
    over = ("model.name=mlp", f"bits={bits}", "budget='120 KiB'")
    for given, channels in (((), False), (("model.levels=channel",), True)):
        job = experiment.build_job(parse(*over, *given), experiment.Cell("QuPeL", 0))
        assert [plan.channels for plan in job.plans] == [channels] * len(job.plans)


# --- presets: MATH.md's table ---

PAPER = Length(rounds=1750, local_steps=10, epoch_steps=50)  # 350 epochs of 50 steps, tau 10


def preset(name, **over):
    config = parse(text=f'[methods.P]\nrecipe = "{name}"\n')
    method = config.methods["P"]
    return find(name).phases(method.model_copy(update=over), PAPER)


@pytest.mark.parametrize("name", ["qupel-corrected", "qupel-paper"])
def test_the_papers_federated_settings(name):
    main, tail = preset(name)
    q, f = main.method, tail.method
    assert isinstance(q, QuPeL)
    assert isinstance(f, QuPeL)
    assert (type(q.quantizer), type(f.quantizer)) == (Prox, Frozen)
    assert (q.enters, f.enters) == ("all", "free")
    assert (main.rounds, tail.rounds) == (1500, 250)  # 300 and 50 epochs
    assert q.optimizer == f.optimizer == SGD(weight_decay=1e-4)
    for epoch in (1, 2, 100, 300):
        assert q.eta1(epoch) == pytest.approx(0.1 * 0.99 ** (epoch - 1))
        assert q.quantizer.lam(epoch) == pytest.approx(1e-6 * epoch)
    assert f.eta1(1) == pytest.approx(0.1 * 0.99**300)  # goes on where QuPeL stopped
    assert [q.quantizer.eta2(e) for e in (1, 120, 121, 180, 181)] == pytest.approx([1e-4, 1e-4, 1e-5, 1e-5, 1e-6])
    assert f.quantizer.eta2(1) == pytest.approx(1e-6)
    for method in (q, f):
        assert method.lambda_p(1) == 0.025
        assert method.lambda_p(300) == 0.025
        assert method.coupling == pytest.approx(5.0 * 0.025)  # eta3 lambda_p
    assert q.quantizer.lam_c is None  # the same lambda for the centers
    assert (q.quantizer.mode, q.quantizer.center_gradient, q.quantizer.init) == ("hard", "sum", "paper")
    assert f.quantizer.center_gradient == "sum"


def test_corrected_and_printed_differ_in_signs_and_steps_only():
    (a, _), (b, _) = preset("qupel-corrected"), preset("qupel-paper")
    assert (a.method.as_printed, b.method.as_printed) == (False, True)
    assert (a.method.quantizer.rule, b.method.quantizer.rule) == ("exact", "paper")
    printed = parse(text='[methods.P]\nrecipe = "qupel-paper"\n').methods["P"]
    assert printed.steps_per_round(10) == 9  # synchronizes instead of stepping
    assert Settings().steps_per_round(10) == 10


@pytest.mark.parametrize("name", recipes)
def test_every_recipe_spends_the_rounds(name):
    phases = preset(name)
    assert sum(p.rounds for p in phases) == PAPER.rounds


def test_recipes_are_made_of_their_parts():
    made = {name: [(type(p.method), quantizer_of(p.method)) for p in preset(name)] for name in recipes}
    kinds = {name: [kind for kind, _ in groupby(found)] for name, found in made.items()}
    plain, tuned = (Local, "none"), (Local, "frozen")
    assert kinds["qupel"] == [(Hedged, "none"), (Hedged, "ste"), (Hedged, "frozen")]
    assert [p.method.stage for p in preset("qupel")] == ["both", "both", "asked", "own", "own"]
    assert kinds["local"] == [plain, (Local, "ste"), tuned]
    assert kinds["qupel-prox"] == [(FedAvg, "none"), (QuPeL, "prox"), (QuPeL, "frozen")]
    assert kinds["local-prox"] == [plain, (Local, "prox"), tuned]  # full precision first
    assert kinds["fedavg"] == [(FedAvg, "none")]
    assert [kind for kind, _ in kinds["fedavg-finetune"]] == [FedAvg, Local]
    assert kinds["proxquant"] == [plain, (Local, "proxquant"), tuned]
    assert kinds["binaryrelax"] == [plain, (Local, "binaryrelax")]
    assert kinds["ptq-range"] == kinds["ptq-kmeans"] == [(Local, "afterwards")]
    assert [preset(f"ptq-{init}")[0].method.quantizer.init for init in ("range", "kmeans")] == ["range", "kmeans"]
    assert math.isinf(preset("binaryrelax")[-1].method.quantizer.lam(1))
    assert preset("proxquant")[-1].method.quantizer.eta2(1) == 0  # its centers never move
    assert all(p.server == Mean() for name in recipes if name not in {"qupel", "quped"} for p in preset(name))
    momentum = FedAvgM(0.9, nesterov=True)
    assert [p.server for p in preset("qupel")] == [momentum, momentum, momentum, Mean(), Mean()]
    assert [p.prior for p in preset("qupel")] == [0, 0, 0, 0.5, 0.5]
    assert [p.held for p in preset("qupel")] == [0.2, 0.2, 0, 0, 0]


SEAMS = ["qupel", "local", "qupel-prox", "local-prox", "fedavg", "fedavg-finetune", "ptq-kmeans"]
SEAMS += ["proxquant", "binaryrelax"]


@pytest.mark.parametrize("name", SEAMS)
def test_step_sizes_go_on_over_the_seams_of_phases(name):
    """eta1 epoch by epoch over all phases is one half cosine, whatever the phases."""
    phases = preset(name)
    first, values = (0.003 if name == "local" else 0.1), []
    for phase in phases:
        values += [phase.method.eta1(1 + round / 5) for round in range(phase.rounds)]  # five rounds are an epoch
    assert values == pytest.approx([first * (1 + math.cos(math.pi * r / 1750)) / 2 for r in range(1750)])


def test_lambda_p_lets_go_over_the_phases_after_the_warm_up():
    _, main, tail = preset("qupel-prox")
    epochs = (main.rounds + tail.rounds) // 5
    values = [main.method.lambda_p(e) for e in range(1, main.rounds // 5 + 1)]
    values += [tail.method.lambda_p(e) for e in range(1, tail.rounds // 5 + 1)]
    start = Settings().lambda_p
    assert values == pytest.approx([start * (1 + math.cos(math.pi * e / epochs)) / 2 for e in range(epochs)])
    kept = [p.method.lambda_p(7) for p in preset("qupel-prox", let_go=False)[1:]]
    assert kept == [start, start]
    _, shared, asked, main, tail = preset("qupel")
    assert shared.method.lambda_p(1) == asked.method.lambda_p(1) == 0
    assert main.method.lambda_p(1) == Settings(**recipes["qupel"].defaults).lambda_p
    assert tail.method.lambda_p(1) == pytest.approx(main.method.lambda_p(1 + main.rounds / 5))


def test_a_budget_with_no_round_for_the_main_phase_is_refused():
    config = parse(
        "rounds=1", "methods.QuPeL.recipe=qupel-prox", "methods.QuPeL.warmup=0.9", "methods.QuPeL.finetune=0.0"
    )
    with pytest.raises(UserError, match="leave no round"):
        experiment.build_job(config, experiment.cells(config)[0])
