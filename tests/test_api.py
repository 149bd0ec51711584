"""`qupel.fit`: what each keyword does, what is refused at the door, what its files are good for."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import qupel
from qupel import deploy
from qupel.engine.door import check_trainable
from qupel.parts.methods.fedavg import FedAvg
from qupel.parts.methods.local import Local
from qupel.parts.phase import Phase
from qupel.parts.servers.fedavgm import FedAvgM
from qupel.run import config as configs
from qupel.run import experiment
from qupel.tasks import zoo as models
from qupel.tasks.metrics import macro_f1
from qupel.util.errors import UserError
from qupel.util.files import read_json
from tiny import CLASSES, INPUTS, make_job, mlp, norm_net, recipe

with warnings.catch_warnings():  # typer imports names that its dependency click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from test_deploy_commands import call

QUICK = {"rounds": 3, "local_steps": 2, "batch": 4, "settings": qupel.Settings(warmup=0.3, finetune=0.3)}


def people(sizes=(8, 8, 8), shape=(INPUTS,), test=5, seed=0):
    """Clients whose label is the place of the largest of their first three numbers."""
    rng = np.random.default_rng(seed)

    def some(n):
        x = rng.standard_normal((n, *shape)).astype(np.float32)
        return x, x.reshape(n, -1)[:, :CLASSES].argmax(1)

    return [(*some(n), *some(test)) for n in sizes]


def fit(net, clients=None, **options):
    return qupel.fit(net, people() if clients is None else clients, **{**QUICK, **options})


def quantized(found):
    """Each client's layers and bits, from the codebooks themselves."""
    return [{slot.name: (len(c) - 1).bit_length() for slot, c in codebook} for codebook in found.codebooks]


def deep(*middle):
    """A net of four layers, with `middle` between its first and its second."""
    torch.manual_seed(0)
    rest = (nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    return nn.Sequential(nn.Linear(INPUTS, 8), *middle, nn.ReLU(), *rest)


# --- bits ---


def test_bits_default_to_the_recipes_own_and_what_is_given_wins():
    tuned = {"method": "fedavg-finetune", "settings": qupel.Settings(finetune=0.4)}
    assert quantized(fit(mlp(), **tuned)) == [{}, {}, {}]
    assert quantized(fit(mlp(), bits=3, **tuned)) == [{"2.weight": 3}] * 3
    assert quantized(fit(mlp())) == [{"2.weight": 2}] * 3
    assert quantized(fit(mlp(), bits=[1, 32, {"0": 4}])) == [{"2.weight": 1}, {}, {"0.weight": 4}]


def test_a_config_takes_the_same_bits_from_the_recipe():
    text = 'bits = 3\n[methods.A]\nrecipe = "fedavg-finetune"\n[methods.B]\nrecipe = "fedavg-finetune"\nbits = 2\n'
    config = configs.parse(text + '[methods.C]\nrecipe = "qupel"\n', "c")
    plans = [set(experiment.build_job(config, cell).plans[0].values()) for cell in experiment.cells(config)]
    assert plans == [set(), {4}, {8}]


def test_bits_for_a_method_that_ships_full_precision_are_refused():
    shallow = nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    for method in ("fedavg", [Phase(FedAvg(), 2)]):
        assert quantized(fit(shallow, method=method)) == [{}] * 3
        with pytest.raises(UserError, match="fedavg, ships full precision; leave bits out"):
            fit(mlp(), method=method, bits=2)


def test_a_wrong_number_of_bits_is_refused():
    with pytest.raises(UserError, match="bits: 2 entries for 3 clients"):
        fit(mlp(), bits=[2, 3])


# --- methods, quantizers, servers ---


def told(found):
    return [(line["method"], line["quantizer"]) for line in found.metrics]


def test_a_name_is_the_recipes_unless_a_quantizer_or_a_server_is_given():
    every = {"evaluate_every": 1}
    assert told(fit(mlp(), **every)) == [("hedged", "ste"), ("hedged", "ste"), ("hedged", "frozen")]
    assert told(fit(mlp(), server="fedavgm", **every)) == [("qupel", "prox")] * 3
    assert told(fit(mlp(), quantizer="ste", **every)) == [("qupel", "ste")] * 3
    assert told(fit(mlp(), method="ditto", quantizer={"name": "lsq"}, **every)) == [("ditto", "lsq")] * 3
    for method in ("qupel-paper", "fedavg-finetune"):
        with pytest.raises(UserError, match=f"quantizer and server go with a method: .*; {method} is a recipe"):
            fit(mlp(), method=method, server="median")
    with pytest.raises(UserError, match="phases have their own"):
        fit(mlp(), method=[Phase(FedAvg(), 2)], server="median")
    with pytest.raises(UserError, match="unknown recipe 'dito'"):
        fit(mlp(), method="dito")
    with pytest.raises(UserError, match="unknown server 'meen'"):
        fit(mlp(), method="ditto", server="meen")


def test_a_server_of_ones_choice_makes_the_global_model():
    """FedAvgM with momentum 0 and rate 1 is the mean; with another rate it is not."""
    plain = fit(mlp(), method="fedavg", server="mean")
    same = fit(mlp(), method="fedavg", server={"name": "fedavgm", "momentum": 0.0, "rate": 1.0})
    other = fit(mlp(), method="fedavg", server=FedAvgM(momentum=0.0, rate=0.5))
    torch.testing.assert_close(same.global_model[0].weight, plain.global_model[0].weight)
    assert not torch.allclose(other.global_model[0].weight, plain.global_model[0].weight)


def test_a_method_that_quantizes_nothing_ships_full_precision():
    shallow = nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    assert quantized(fit(shallow, method="scaffold")) == [{}] * 3
    with pytest.raises(UserError, match="scaffold, ships full precision; leave bits out"):
        fit(mlp(), method="scaffold", bits=2)


def test_levels_of_channels(tmp_path):
    found = fit(mlp(), levels="channel", bits=1)
    for model, codebook in zip(found.models, found.codebooks, strict=True):
        assert [scale.shape for scale in codebook.scales] == [(8,)]
        assert all(len(row.unique()) <= 2 for row in model[2].weight)  # two levels in each output channel
        assert len(model[2].weight.unique()) > 2
    x = torch.from_numpy(people()[0][2])
    with torch.no_grad():
        assert torch.equal(qupel.load(found.save(tmp_path)[0], mlp())(x), found.models[0](x))


def test_losses_and_metrics_by_name_and_as_functions():
    named = fit(mlp(), loss="cross_entropy", metrics=["macro_f1", "top5"])
    own = fit(mlp(), loss=F.cross_entropy, metrics={"macro_f1": macro_f1, "twice": lambda y, t: 2.0})
    last, other = named.metrics[-1], own.metrics[-1]
    assert (last["test_top5"], other["test_twice"]) == (1, 2)
    assert last["test_macro_f1"] == other["test_macro_f1"]
    assert last["test_loss"] == other["test_loss"]
    for options, says in (({"loss": "hubr"}, "unknown loss 'hubr'"), ({"metrics": ["f1"]}, "unknown metric 'f1'")):
        with pytest.raises(UserError, match=says):
            fit(mlp(), **options)


def test_the_code_in_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names: dict = {}
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), names)
    assert np.mean(names["result"].test) > 0.75
    assert capsys.readouterr().out.strip() == str(names["result"].test)
    assert [set(layers.values()) for layers in names["result"].quantized] == [{2}] * 5 + [{3}] * 4 + [set()]
    assert len(list((tmp_path / "models").glob("client-*.safetensors"))) == 10


# --- which layers ---


def normed(which):
    net = deep()
    for i in which:
        weight_norm(net[i])
    return net


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (lambda: nn.Linear(INPUTS, CLASSES), "there is no other; name layers (layers = ['weight']), or ask for full"),
        (lambda: nn.Sequential(nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES)), "layers = ['0', '1']"),
        (lambda: normed((0, 2, 4, 6)), "(0.weight, 2.weight, 4.weight, 6.weight: computed from other parameters"),
        (lambda: normed((2, 4)), "(2.weight, 4.weight: computed from other parameters"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.PReLU(6)),
            "it has no layer of a kind that can be; ask for full precision",
        ),
    ],
)
def test_bits_that_no_layer_would_get_are_refused(net, words):
    with pytest.raises(UserError, match=r"^bits = 2: nothing .* would be quantized") as caught:
        fit(net(), bits=2)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers():
    shallow = nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    found = fit(shallow, layers=["0", "2.weight"])
    assert quantized(found) == [{"0.weight": 2, "2.weight": 2}] * 3
    assert all(len(m[0].weight.unique()) <= 4 for m in found.models)
    with pytest.raises(UserError, match="no layer is named"):
        fit(mlp(), layers=[])
    with pytest.raises(UserError, match="layer '2' cannot be quantized: computed from other parameters"):
        fit(normed((2,)), layers=["2"])


def test_a_computed_weight_takes_no_other_layers_place():
    """The first layer is the first one also where it has a weight_norm: what stands behind it is quantized."""
    assert quantized(fit(normed((0,))))[0] == {"2.weight": 2, "4.weight": 2}


class Tied(nn.Module):
    """An autoencoder whose last layer has the weight of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(INPUTS, INPUTS) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(F.relu(self.middle(F.relu(self.first(x)))))


def test_a_last_layer_that_is_tied_to_the_first():
    found = fit(Tied())
    assert quantized(found) == [{"middle.weight": 2}] * 3
    assert all(len(m.middle.weight.unique()) <= 4 and m.last.weight is m.first.weight for m in found.models)
    assert all(len(m.first.weight.unique()) == INPUTS**2 for m in found.models)


class Widening(nn.Module):
    """A transposed convolution of 1, 2 or 3 dimensions between a convolution and a Linear layer."""

    def __init__(self, dims):
        super().__init__()
        conv = getattr(nn, f"Conv{dims}d")
        transposed = getattr(nn, f"ConvTranspose{dims}d")
        self.narrow, self.wide = conv(1, 4, 3, padding=1), transposed(4, 2, 3, stride=2)
        self.head = nn.Linear(2 * 9**dims, CLASSES)

    def forward(self, x):
        return self.head(F.relu(self.wide(F.relu(self.narrow(x)))).flatten(1))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions_are_quantized_in_every_format(dims, tmp_path):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    clients = people((6,), shape=(1, *[4] * dims))
    found = fit(Widening(dims), clients, bits=3)
    assert quantized(found) == [{"wide.weight": 3}]
    (model,) = found.models
    assert len(model.wide.weight.unique()) <= 8
    x = torch.from_numpy(clients[0][2])
    with torch.no_grad():
        wanted = model(x)
    (packed,), (graph,) = found.save(tmp_path), found.save(tmp_path, to="onnx")
    with torch.no_grad():
        assert torch.equal(qupel.load(packed, Widening(dims))(x), wanted)
        assert torch.equal(deploy.keep_packed(deploy.load(packed), Widening(dims))(x), wanted)
    for keep in (False, True):
        torch.testing.assert_close(
            torch.from_numpy(deploy.open_model(graph, keep_packed=keep).run(x.numpy())), wanted, atol=1e-4, rtol=1e-4
        )
    assert call("inspect", graph).count("wide.weight") == call("inspect", packed).count("wide.weight") == 2


# --- frozen and unused parameters, batches of one ---


@pytest.mark.parametrize("vectorize", ["off", "on"])
@pytest.mark.parametrize("method", ["qupel", "local", "fedavg"])
def test_frozen_parameters_stay_as_they_are_and_are_in_the_file(method, vectorize, tmp_path):
    net = deep()
    net[0].requires_grad_(False)
    net[4].bias.requires_grad_(False)
    before = {name: p.clone() for name, p in net.named_parameters()}
    settings = qupel.Settings(warmup=0.3, finetune=0.3, weight_decay=0.1)
    found = fit(net, method=method, vectorize=vectorize, settings=settings)
    assert found.engine.stacked == (vectorize == "on")
    for model in (*found.models, found.global_model):
        for name, p in model.named_parameters():
            still = not p.requires_grad or (method == "local" and model is found.global_model)
            assert torch.equal(p, before[name]) == still, name
    path = found.save(tmp_path)[0]
    again = qupel.load(path, deep())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), found.models[0].parameters(), strict=True))
    dense = 4 * sum(p.numel() for p in net.parameters())
    assert (found.metrics[-1]["model_bytes"] == dense) == (method == "fedavg")


def test_frozen_parameters_on_workers():
    net = deep(nn.BatchNorm1d(8))
    net[0].requires_grad_(False)
    one, two = (fit(net, workers=n) for n in (1, 2))
    for a, b in zip((*one.models, one.global_model), (*two.models, two.global_model), strict=True):
        assert torch.equal(a[0].weight, net[0].weight)
        assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_frozen_layer_is_not_quantized():
    net = deep()
    net[2].weight.requires_grad_(False)
    assert quantized(fit(net))[0] == {"4.weight": 2}
    with pytest.raises(UserError, match=r"layer '2' cannot be quantized: frozen"):
        fit(net, layers=["2", "4"])
    net.requires_grad_(False)
    with pytest.raises(UserError, match="no parameters to train: all are frozen"):
        fit(net, bits=32)


@pytest.mark.parametrize("options", [{"clients": people((8, 1, 8))}, {"batch": 1}])
@pytest.mark.parametrize("method", ["qupel", "fedavg", "local", "ptq-kmeans"])
def test_one_sample_is_too_few_for_batchnorm(method, options):
    who = "batch = 1" if "batch" in options else "client 1 has 1 training sample"
    with pytest.raises(UserError, match=f"^{who}, and this model's BatchNorm needs at least 2"):
        fit(norm_net(), method=method, **options)


def test_one_sample_is_enough_for_others():
    """A BatchNorm over pixels has several values of one sample, and other normalizations need none."""
    torch.manual_seed(0)
    pixels = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, CLASSES))
    assert len(fit(pixels, people((8, 1), shape=(1, 4, 4))).models) == 2
    assert len(fit(deep(nn.LayerNorm(8)), people((8, 1))).models) == 2


class Spare(nn.Module):
    """A layer and a parameter that the outputs do not depend on."""

    def __init__(self):
        super().__init__()
        self.net, self.layer, self.number = deep(), nn.Linear(4, 4), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("vectorize", ["off", "on"])
def test_unused_parameters_stay_as_they_are(vectorize, tmp_path):
    net = Spare()
    found = fit(net, vectorize=vectorize, layers=["net.2", "net.4"])
    for model in found.models:
        torch.testing.assert_close(model.layer.weight, net.layer.weight)
        assert torch.equal(model.number, net.number)
    again = qupel.load(found.save(tmp_path)[0], Spare())
    x = torch.from_numpy(people()[0][0])
    with torch.no_grad():
        assert torch.equal(again(x), found.models[0](x))


def unreduced(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def test_what_torch_would_fail_on_later_is_refused_at_the_door():
    for loss in (unreduced, lambda outputs, targets: torch.tensor(1.0)):
        with pytest.raises(UserError, match="the model or the loss does not take this data"):
            fit(mlp(), loss=loss)
    few = nn.Sequential(nn.Linear(INPUTS, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES - 1))
    sorted_rows = [(x[y.argsort()], np.sort(y)) for x, y, *_ in people((20, 20))]  # the largest label comes last
    with pytest.raises(UserError, match="Target 2 is out of bounds"):
        fit(few, sorted_rows)
    with pytest.raises(UserError, match=r"'0.weight' has no shape yet"):
        fit(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8), nn.Linear(8, CLASSES)))


# --- BatchNorm ---


def test_the_global_models_statistics_are_of_all_clients():
    net = nn.Sequential(nn.BatchNorm1d(INPUTS), *deep())
    clients = [(x + 10 * i, y, tx + 10 * i, ty) for i, (x, y, tx, ty) in enumerate(people((6, 30, 12)))]
    found = fit(net, clients, method="fedavg", standardize="off")
    pooled = torch.from_numpy(np.concatenate([c[0] for c in clients]))
    torch.testing.assert_close(found.global_model[0].running_mean, pooled.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.global_model[0].running_var, pooled.var(0), atol=1e-3, rtol=1e-3)
    assert not found.global_model.training
    assert torch.equal(net[0].running_mean, torch.zeros(INPUTS))
    torch.testing.assert_close(found.models[1][0].running_mean, pooled[6:36].mean(0), atol=1e-4, rtol=1e-4)


def test_the_check_at_the_door_leaves_the_module_and_the_generator_alone():
    net = norm_net()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    job = make_job(recipe(), module=net, bits=(32,))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_trainable(job)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


# --- out ---


def half_loss(outputs, targets):
    return 0.5 * F.cross_entropy(outputs, targets)


def with_activation(kind):
    net = mlp()
    net[1] = kind()
    return net


def other_tests():
    return [(*c[:2], *other[2:]) for c, other in zip(people(), people(seed=1), strict=True)]


@pytest.mark.parametrize(
    "change",
    [
        {"loss": half_loss},
        {"net": with_activation(nn.Tanh)},
        {"clients": other_tests()},
        {"evaluate_every": 1},
        {"evaluate_sample": 0.5},
        {"diagnostics": "cheap"},
        {"seed": 1},
        {"bits": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_out_never_gives_the_results_of_another_fit(change, tmp_path):
    first = fit(mlp(), out=tmp_path)
    rounds = []
    again = fit(mlp(), out=tmp_path, watch=rounds.append)
    assert rounds == []  # all was done
    assert again.metrics == first.metrics
    what = "other data" if "clients" in change else "other settings"
    with pytest.raises(UserError, match=what):
        fit(**{"net": mlp(), "out": tmp_path, **change})


def test_fit_and_a_run_from_python_leave_the_summary_of_the_command_line(tmp_path):
    found = fit(mlp(), out=tmp_path / "fit", method="local")
    (row,) = json.loads((tmp_path / "fit/summary.json").read_text())
    assert (row["label"], row["seeds"]) == ("local", 1)
    assert row["mean"] == pytest.approx(100 * np.mean(found.test))
    assert re.match(r"\| method \|.*\n.*\n\| local \|", (tmp_path / "fit/summary.md").read_text())
    text = "rounds = 2\nlocal_steps = 1\n[split]\nclients = 2\ntrain_per_client = 4\n[model]\nname = 'mlp'\n"
    text += "[methods.One]\nrecipe = 'fedavg'\n[methods.Two]\nrecipe = 'local'\nfinetune = 0.0\n"
    experiment.run_experiment(configs.parse(text, "c"), tmp_path / "run")
    assert [r["label"] for r in json.loads((tmp_path / "run/summary.json").read_text())] == ["One", "Two"]
    assert "| Two |" in (tmp_path / "run/summary.md").read_text()
    results = [json.loads(p.read_text()) for p in sorted((tmp_path / "run").glob("cells/*/result.json"))]
    assert [r["quantized"] for r in results] == [[], ["3.weight"]]


def test_what_a_fit_leaves_is_a_run_directory_for_every_command(tmp_path):
    found = fit(mlp(), out=tmp_path / "fit", bits=[2, 3, 32])
    cell = tmp_path / "fit/cells/qupel-s0"
    assert {p.name for p in cell.iterdir()} >= {"metrics.jsonl", "result.json", "engine.json", "models", "checkpoints"}
    result = read_json(cell / "result.json")
    assert result["lines"][-1]["clients"]["test"] == found.test
    assert result["files"] == [p.stat().st_size for p in sorted((cell / "models").iterdir())]
    subprocess.run([sys.executable, "-m", "qupel", "report", tmp_path / "fit"], check=True, capture_output=True)
    assert "qupel" in (tmp_path / "fit/report/index.html").read_text()
    call("export", tmp_path / "fit", "--client", 1, "--out", tmp_path / "exported")
    exported, kept = tmp_path / "exported/client-001.safetensors", cell / "models/client-001.safetensors"
    assert exported.read_bytes() == kept.read_bytes()
    filled = qupel.load(exported, mlp(seed=3))
    x = torch.from_numpy(people()[1][2])
    assert torch.equal(filled(x), found.models[1](x))


def test_without_labels_or_test_data_there_is_no_summary(tmp_path):
    fit(mlp(), [c[:2] for c in people()], out=tmp_path / "a")
    numbers = [(x, F.one_hot(torch.from_numpy(y), CLASSES).float()) * 2 for x, y, *_ in people()]
    fit(mlp(), numbers, out=tmp_path / "b")
    assert not list(tmp_path.glob("*/summary.*"))


# --- files ---


def table(path, x):
    np.savez(path, inputs=x)
    return path


def test_a_saved_network_of_ours_is_understood_by_every_command(tmp_path):
    clients = people((8, 8))
    found = fit(models.build("mlp", (INPUTS,), CLASSES, 0), clients)
    paths = found.save(tmp_path / "models")
    about = deploy.load(paths[1]).about
    assert (about.model, about.input_shape, about.classes, about.client) == ("mlp", (INPUTS,), CLASSES, "client 1")
    assert about.extra == {"method": "qupel", "seed": 0, "test": round(found.test[1], 6)}
    x, y = clients[1][2:]
    with torch.no_grad():
        best = found.models[1](torch.from_numpy(x)).argmax(1).tolist()
    said = call("predict", paths[1], table(tmp_path / "x.npz", x))
    assert [int(line.split(": ")[1].split()[0]) for line in said.splitlines()] == best
    data = tmp_path / "data.npz"
    np.savez(data, train_inputs=clients[1][0], train_targets=clients[1][1], test_inputs=x, test_targets=y)
    assert f"{100 * found.test[1]:.2f} % of 5 test samples" in call("eval", paths[1], "--data", data)
    call("export", tmp_path / "models", "--all", "--to", "packed", "--out", tmp_path / "again")
    assert (tmp_path / "again/client-001.safetensors").read_bytes() == paths[1].read_bytes()
    assert "mlp" in call("inspect", paths[0])
    x = torch.from_numpy(x)
    with torch.no_grad():
        assert torch.equal(qupel.load(paths[1])(x), found.models[1](x))


def test_a_saved_network_of_the_users_own(tmp_path):
    pytest.importorskip("onnxruntime")
    clients = people((8, 8))
    found = fit(deep(nn.BatchNorm1d(8)), clients)
    paths = found.save(tmp_path)
    assert deploy.load(paths[0]).about.model == ""
    assert "3.weight" in call("inspect", paths[0])
    numbers = table(tmp_path / "x.npz", clients[0][2])
    how = r"qupel\.load\(FILE, module\).*--model my_module:Name.*ONNX"
    data = tmp_path / "data.npz"
    np.savez(
        data, **dict(zip(("train_inputs", "train_targets", "test_inputs", "test_targets"), clients[0], strict=True))
    )
    for command in (
        ("predict", paths[0], numbers),
        ("export", paths[0], "--to", "onnx"),
        ("eval", paths[0], "--data", data),
    ):
        assert re.search(how, call(*command, code=2))
    call("export", tmp_path, "--client", 1, "--rest", "fp16", "--out", tmp_path / "half")
    half = deploy.load(tmp_path / "half/client-001.safetensors")
    assert {str(v.dtype) for v in half.rest.values()} == {"float16"}
    half.into(deep(nn.BatchNorm1d(8)))
    graph = found.save(tmp_path, to="onnx")[0]
    with torch.no_grad():
        best = found.models[0](torch.from_numpy(clients[0][2])).argmax(1).tolist()
    assert [int(line.split(": ")[1].split()[0]) for line in call("predict", graph, numbers).splitlines()] == best
    assert f"{100 * found.test[0]:.2f} % of 5 test samples" in call("eval", graph, "--data", data)
    with pytest.raises(UserError, match="unknown exporter 'tflite'"):
        found.save(tmp_path, to="tflite")


def test_predictions_without_classes_are_the_outputs(tmp_path):
    pytest.importorskip("onnxruntime")
    clients = [(x, x[:, :2].copy(), tx, tx[:, :2].copy()) for x, _, tx, _ in people((8,))]
    net = nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    found = fit(net, clients)
    (graph,) = found.save(tmp_path, to="onnx")
    assert "test" not in deploy.open_model(graph).about.extra
    said = call("predict", graph, table(tmp_path / "x.npz", clients[0][2]))
    values = [[float(v) for v in line.split(": ")[1].split(", ")] for line in said.splitlines()]
    with torch.no_grad():
        wanted = found.models[0](torch.from_numpy(clients[0][2]))
    torch.testing.assert_close(torch.tensor(values), wanted, atol=1e-4, rtol=1e-4)


def test_images_are_fed_as_they_were_in_training(tmp_path):
    """uint8 images: the file carries mean and std, so that predicting from pixels is what training did."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 1, 8, 8), dtype=np.uint8)
    found = fit(models.digits_cnn(), [(pixels, np.arange(12) % 10, pixels[:4], np.arange(4))])
    (path,) = found.save(tmp_path)
    about = deploy.load(path).about
    assert (about.model, about.input_shape, len(about.mean)) == ("digits_cnn", (1, 8, 8), 1)
    said = call("predict", path, table(tmp_path / "x.npz", pixels[:4]))
    best = [int(line.split(": ")[1].split()[0]) for line in said.splitlines()]
    assert found.test == [pytest.approx(np.mean(np.array(best) == np.arange(4)))]


def test_phases_of_ones_own():
    found = fit(mlp(), method=[Phase(FedAvg(), 1), Phase(Local(), 2)], bits=[1, 3, 32])
    assert found.quantized == quantized(found) == [{"2.weight": 1}, {"2.weight": 3}, {}]
    assert found.about.extra["method"] == "own phases"


def test_a_network_that_differs_from_ours_in_anything_has_no_name():
    nets = [models.mlp(INPUTS, classes=CLASSES) for _ in range(3)]
    nets[1][2] = nn.Tanh()
    nets[2][3] = nn.Linear(256, 128, bias=False)
    assert [fit(net, people((6,))).about.model for net in nets] == ["mlp", "", ""]
