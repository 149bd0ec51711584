# %% [markdown]
# # Comparing methods honestly
# Three habits: settings are chosen on validation data, and test data is looked at once; methods are compared on the
# same seeds (the same clients, batches and first model), pair by pair; and a difference is tested over seeds, not over
# clients, which are not independent.

# %%
from pathlib import Path

from qupel.report.significance import over_seeds, seed_difference
from qupel.run import config as configs
from qupel.run.experiment import run_experiment

COMMON = """
bits = 2
rounds = 10
save_models = false
model = {name = "mlp", args = {hidden = [64, 32]}}
[split]
clients = 6
train_per_client = 20
"""


def run(name: str, seeds: list[int], validation: float, methods: dict[str, str]):
    """{(method, seed): the last line of its metrics}"""
    text = f"seeds = {seeds}\n{COMMON}validation = {validation}\n"
    text += "".join(f'[methods."{label}"]\n{settings}\n' for label, settings in methods.items())
    results = run_experiment(configs.parse(text, name), Path("runs") / name)
    return {(r["label"], r["seed"]): r["lines"][-1] for r in results}


# %% [markdown]
# ## Choose on validation data
# With seeds of their own, which the comparison below does not use again.

# %%
choices = {f"warm-up {share}": f'recipe = "qupel"\nwarmup = {share}' for share in (0.3, 0.6)}
found = run("choose", [100, 101], 0.3, choices)
scores = {label: sum(found[label, seed]["validation"] for seed in (100, 101)) / 2 for label in choices}
best = max(scores, key=scores.get)
print(f"validation accuracy: {scores}; chosen: {best}")

# %% [markdown]
# ## Compare once on test data

# %%
found = run("compare", [0, 1, 2, 3], 0, {"QuPeL": choices[best], "Local": 'recipe = "local"'})
each = {}
for seed in range(4):
    ours, others = (found[label, seed]["clients"]["test"] for label in ("QuPeL", "Local"))
    each[seed] = seed_difference(ours, others)  # the mean over clients, pair by pair
gain = over_seeds(each)
print(f"QuPeL - Local: {100 * gain.mean:+.1f} points, 95 % interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f}, "
      f"p = {gain.p:.3f} over {len(each)} seeds")  # fmt: skip

# %% [markdown]
# `qupel run` prints the same as a table, `qupel report` draws it. With four seeds only large differences can be told
# from chance.
