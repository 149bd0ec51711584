"""Put a finished run's comparison under docs/results: the table with its command and machine, the numbers, the picture.

    python experiments/publish.py runs/NAME [runs/OTHER ...]

The page is named after the first run; tables of further runs are added to it.
"""

import json
import shutil
import sys
from pathlib import Path

TARGET = Path(__file__).parent.parent / "docs" / "results"
COMMAND = {True: "train", False: "run"}


def section(run: Path) -> str:
    config = json.loads((run / "config.json").read_text())
    cells = [json.loads(p.read_text()) for p in sorted(run.glob("cells/*/result.json"))]
    machine = cells[0]["machine"]
    command = COMMAND[config["split"]["kind"] == "one"]
    seconds = sum(cell["seconds"] for cell in cells)
    told = (
        f"`qupel {command} experiments/{run.name}.toml --out runs/{run.name}`; seeds {config['seeds']}; "
        f"{machine['cpus']} CPUs ({machine['processor']}), Python {machine['python']}, torch {machine['torch']}; "
        f"{seconds / 60:.0f} minutes in all.\n"
    )
    return told + "\n" + (run / "summary.md").read_text()


def main() -> None:
    runs = [Path(name) for name in sys.argv[1:]]
    if not runs:
        raise SystemExit(__doc__)
    TARGET.mkdir(parents=True, exist_ok=True)
    name = runs[0].name
    page = f"# {name}\n\n" + "\n".join(section(run) for run in runs)
    if (runs[0] / "summary.png").exists():
        shutil.copy(runs[0] / "summary.png", TARGET / f"{name}.png")
        page += f"\n![{name}]({name}.png)\n"
    (TARGET / f"{name}.md").write_text(page)
    raw = {run.name: json.loads((run / "summary.json").read_text()) for run in runs}
    (TARGET / f"{name}.json").write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
