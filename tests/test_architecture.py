"""Imports point one way: a room knows those before it, never those behind it; optional packages wait until used."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import qupel

SOURCE = Path(qupel.__file__).parent
# From the ground up; a room may import itself and what stands before it. Where a module has a place of its own before
# its room's, that place counts.
ROOMS = (
    ("util",), ("core",), ("tasks",), ("data",), ("parts",), ("paper.theory", "paper.diagnostics"), ("engine",),
    ("deploy",), ("report",), ("run",), ("flower",), ("paper",), ("cli",),
)  # fmt: skip
KINDS = ("methods", "quantizers", "servers", "codecs")
# of the parts, what an engine may know: what a part is, and the server that phases have by default
KNOWN_TO_ENGINES = {"parts", "parts.base", "parts.phase", "parts.prior", "parts.servers.mean"}
KNOWN_TO_ENGINES |= {f"parts.{kind}{end}" for kind in KINDS for end in ("", ".base")}
OPTIONAL = (
    "onnx",
    "onnxruntime",
    "onnxscript",
    "coremltools",
    "datasets",
    "flwr",
    "zstandard",
    "tensorboard",
    "dp_accounting",
)
HEAVY = ("torch", "numpy", "scipy", "sklearn", "matplotlib", "pyarrow", "PIL", "pydantic", "safetensors")
DOORS = {"", "__main__"}  # the package's own front doors stand outside
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 400  # of a file
CORE_LINES = 2200  # of the mathematics: core, and what parts have in common, with their docstrings
PART_LINES = 150  # of a part, which reads like its paper's listing


def name(path: Path) -> str:
    """parts/methods/base.py -> parts.methods.base, and a package by its folder."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {name(path): path for path in FILES}


def statements(node: ast.AST):
    """All that is below a node, but for what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from statements(other)
            continue
        yield child
        yield from statements(child)


def imports(path: Path):
    """(module, names) of every import in a file, also of those inside functions."""
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or "", tuple(alias.name for alias in node.names)


def own(path: Path) -> set[str]:
    """The modules of this package that a file imports, and the packages they are in, which are loaded with them."""
    found = set()
    for module, names in imports(path):
        if module.split(".")[0] != "qupel":
            continue
        home = module.removeprefix("qupel").removeprefix(".")
        inside = {f"{home}.{n}".removeprefix(".") for n in names} & set(MODULES)
        assert home in MODULES, f"{path} imports {module}, which is not there"
        found |= inside | ({home} if home else set())
    parents = {m.rsplit(".", k)[0] for m in found for k in range(1, m.count(".") + 1)}
    return found | parents


GRAPH = {module: own(path) - {module} for module, path in MODULES.items()}


def reached(module: str) -> set[str]:
    """All that is loaded with a module, through whatever others."""
    found, left = set(), [module]
    while left:
        for other in GRAPH[left.pop()] - found:
            found.add(other)
            left.append(other)
    return found


def place(module: str) -> int | None:
    """The number of a module's room, None where it has none; the longest name counts."""
    found = [(len(name), k) for k, names in enumerate(ROOMS) for name in names if f"{module}.".startswith(f"{name}.")]
    return max(found)[1] if found else None


PACKAGE_FILES = {"paper"}  # empty ones of a package whose modules stand in several rooms


def in_a_room(modules) -> set[str]:
    return set(modules) - DOORS - PACKAGE_FILES


def test_every_module_is_in_a_room():
    assert [m for m in in_a_room(MODULES) if place(m) is None] == []
    assert [n for names in ROOMS for n in names if n not in MODULES] == []
    assert all(MODULES[m].read_text() == "" for m in PACKAGE_FILES)
    assert len({m.split(".")[0] for m in in_a_room(MODULES)} | PACKAGE_FILES) <= 12  # entries of the package


@pytest.mark.parametrize("module", sorted(in_a_room(MODULES)))
def test_imports_point_to_the_rooms_before(module):
    """Directly and through others."""
    behind = sorted(m for m in in_a_room(reached(module)) if place(m) > place(module))
    assert not behind, f"{module} reaches what stands behind it; itself it imports {sorted(GRAPH[module])}"


def test_parts_know_neither_data_nor_networks_nor_engines():
    for module in MODULES:
        if place(module) == place("parts"):
            forbidden = {m for m in reached(module) if m.startswith(("data", "engine", "deploy", "paper", "run"))}
            assert not forbidden | ({"tasks.zoo", "tasks.judge"} & reached(module)), module


@pytest.mark.parametrize("kind", KINDS)
def test_parts_do_not_know_others_of_their_kind(kind):
    """Each reads alone, like its paper's listing: of the others it shares `base`."""
    home = f"parts.{kind}"
    for module in MODULES:
        if module.startswith(f"{home}.") and module != f"{home}.base":
            others = {m for m in GRAPH[module] if m.startswith(f"{home}.")}
            assert others <= {f"{home}.base"}, module


def test_engines_know_no_concrete_part():
    for module in MODULES:
        if place(module) == place("engine"):
            parts = {m for m in reached(module) if m.split(".")[0] == "parts"}
            assert parts <= KNOWN_TO_ENGINES, module


def test_the_path_of_an_import_is_followed():
    """This file's own tools: a module by any way of importing it, and nothing that only type checkers load."""
    assert "parts.servers.mean" in reached("engine.job")  # through parts.phase
    assert {"tasks", "tasks.zoo"} <= GRAPH["run.sections"]  # `from qupel.tasks import zoo`
    hidden = ast.parse("if TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    import c\n")
    seen = [alias.name for node in statements(hidden) if isinstance(node, ast.Import) for alias in node.names]
    assert seen == ["b", "c"]


def test_files_stay_short():
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {m: n for m, n in lines.items() if n > MOST_LINES} == {}
    parts = {m for m in lines if m.startswith(tuple(f"parts.{kind}." for kind in KINDS)) and not m.endswith(".base")}
    assert {m: lines[m] for m in parts if lines[m] > PART_LINES} == {}
    common = {m for m in lines if place(m) in {place("core"), place("parts")}} - parts
    assert sum(lines[m] for m in common) < CORE_LINES


def test_every_package_that_is_imported_is_declared():
    """Installed by another package's favour is not declared."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    named = {re.match(r"[\w-]+", d)[0].lower() for d in declared}
    of = {"sklearn": "scikit-learn", "PIL": "pillow", "dp_accounting": "dp-accounting"}
    for path in FILES:
        for module, _ in imports(path):
            top = module.split(".")[0]
            known = top in sys.stdlib_module_names or top == "qupel" or of.get(top, top) in named
            assert known, f"{path} imports {top}"


def test_nothing_imports_the_command_line():
    assert {module for module, others in GRAPH.items() if "cli" in others} == {"__main__"}


def test_nothing_is_unpickled():
    """What is read back is JSON, safetensors or raw numbers."""
    for path in FILES:
        modules = {m for m, _ in imports(path)}
        assert not {"pickle", "marshal", "shelve", "joblib", "dill"} & modules, path
        assert "torch.load(" not in path.read_text(), path
        assert "allow_pickle=True" not in path.read_text(), path


def test_optional_packages_are_imported_where_they_are_used():
    """Never at the top of a file: neither `import qupel` nor the command line's help may need them."""
    loaded_by_flower = {SOURCE / "flower" / "client_app.py", SOURCE / "flower" / "server_app.py"}
    for path in set(FILES) - loaded_by_flower:
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & set(OPTIONAL), path


@pytest.mark.parametrize("words", [["-c", "import qupel"], ["-m", "qupel", "--help"]])
def test_the_package_and_its_help_load_nothing_heavy(words):
    """What takes seconds to load is loaded by the command that needs it."""
    words = [sys.executable, "-X", "importtime", *words]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in told.splitlines()}
    assert "qupel" in loaded
    assert not loaded & {*OPTIONAL, *HEAVY}
