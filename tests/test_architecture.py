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
# from the ground up; a room may import itself and what stands before it
ROOMS = (
    "util", "core", "tasks", "data", "parts", "paper", "engine",
    "deploy", "run", "flower", "report", "cli",
)  # fmt: skip
OPTIONAL = ("onnx", "onnxruntime", "onnxscript", "coremltools", "datasets", "flwr", "zstandard", "tensorboard")
DOORS = {"__init__", "__main__"}  # the package's own front doors stand outside


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path):
    """(module, names) of every import in a file, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or "", tuple(alias.name for alias in node.names)


def own(path: Path):
    """The rooms of this package that a file imports."""
    for module, names in imports(path):
        if module == "qupel":
            yield from names
        elif module.startswith("qupel."):
            yield module.split(".")[1]


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_file_is_in_a_known_room():
    assert {room(f) for f in FILES} - DOORS == set(ROOMS)


@pytest.mark.parametrize("path", [f for f in FILES if room(f) not in DOORS], ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_point_to_the_rooms_before(path):
    here = ROOMS.index(room(path))
    for name in own(path):
        if name == "__version__":
            continue
        assert name in ROOMS, f"{path} imports qupel.{name}"
        assert ROOMS.index(name) <= here, f"{room(path)} imports {name}, which stands behind it"


def test_algorithms_know_neither_data_nor_engines():
    for path in (SOURCE / "algorithms").glob("*.py"):
        assert not {"data", "engine", "models", "evaluate"} & set(own(path)), path


def test_methods_do_not_know_one_another():
    """Each reads alone, like its paper's listing: of the others it shares `base` and `quantizer` only."""
    for path in (SOURCE / "algorithms").glob("*.py"):
        if path.stem == "__init__":
            continue
        shared = {m.split(".")[2] for m, _ in imports(path) if m.startswith("qupel.parts.methods.")}
        assert shared <= {"base", "quantizer"}, path


def test_engines_know_no_concrete_method():
    allowed = {"Phase", "Method", "State", "Deployed", "keeps_state", "streams"}
    for path in (SOURCE / "engine").glob("*.py"):
        for module, names in imports(path):
            if module.startswith("qupel.parts.methods"):
                assert module in {"qupel.parts.methods", "qupel.parts.methods.base"}, path
                assert set(names) <= allowed, path


def test_every_package_that_is_imported_is_declared():
    """Installed by another package's favour is not declared."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    named = {re.match(r"[\w-]+", d)[0].lower() for d in declared}
    of = {"sklearn": "scikit-learn", "PIL": "pillow"}
    for path in FILES:
        for module, _ in imports(path):
            top = module.split(".")[0]
            known = top in sys.stdlib_module_names or top == "qupel" or of.get(top, top) in named
            assert known, f"{path} imports {top}"


def test_nothing_imports_the_command_line():
    assert {path.name for path in FILES if "cli" in own(path)} <= {"__main__.py"}


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


def test_importing_the_package_loads_no_optional_package():
    code = f"import sys, qupel; print(sorted(set({OPTIONAL!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
