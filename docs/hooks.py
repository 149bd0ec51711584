"""What the documentation site has beside docs/*.md, made anew with every build: the notebooks as pages, the README as
the front page, a page of every config key and one of every public name. mkdocs.yml names this file."""

import re
import types
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import qupel
from qupel.run.config import Config, MethodConfig

ROOT = Path(__file__).parents[1]
FRONT = {"README.md": "index.md", "SECURITY.md": "security.md", "CONTRIBUTING.md": "contributing.md",
         "CHANGELOG.md": "changelog.md"}  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|!?\[[^\]]*\](?:\([^)]*\))?)*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {f"tutorials/{path.stem}.md": notebook(path) for path in sorted((ROOT / "examples").glob("*.py"))}
    made |= {page: (ROOT / name).read_text() for name, page in FRONT.items()}
    made |= {"keys.md": keys_page(), "names.md": names_page()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Links to the project's files as links of the site; what the site has not stays as words."""
    at = page.file.src_uri
    home = next((name for name, made in FRONT.items() if made == at), f"docs/{at}")  # where the text is in the project

    def site(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        name, _, heading = target.partition("#")
        if re.match(r"[a-z]+:", target) or not name:
            return match[0]
        place = normpath(str(PurePosixPath(home).parent / name))
        there = FRONT.get(place, place.removeprefix("docs/"))
        if place.startswith("examples/"):
            there = f"tutorials/{PurePosixPath(place).stem}.md"
        file = files.get_file_from_path(there)
        if file is None or file.inclusion.is_excluded():
            return words
        link = relpath(there, str(PurePosixPath(at).parent))
        return f"{image}[{words}]({link}{'#' + heading if heading else ''})"

    return LINK.sub(site, markdown)


def notebook(path: Path) -> str:
    """A percent script as a page: text as it is, code in blocks."""
    import jupytext

    cells = [
        cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
        for cell in jupytext.read(path).cells
    ]
    return "\n\n".join([*cells, f"The whole of it: `examples/{path.name}`; `make notebooks` makes a notebook of it."])


def all_keys() -> Iterator[tuple[str, Any]]:
    """(key, pydantic's field) of everything a config can say."""
    for name, field in Config.model_fields.items():
        kinds = [MethodConfig] if name == "methods" else [field.annotation, *get_args(field.annotation)]
        table = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if table is not None:  # also one that need not be there
            prefix = "methods.LABEL" if name == "methods" else name
            yield from ((f"{prefix}.{key}", inner) for key, inner in table.model_fields.items())
        else:
            yield name, field


def keys_page() -> str:
    told = described((ROOT / "docs/configuration.md").read_text())
    lines = [
        "# Every key\n",
        "Made from the models that read a config (`run/config.py`, `run/recipes.py`). Settings of a method may also",
        "stand in `[settings]`, for all methods. [Settings](configuration.md) has the whole picture.\n",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for key, field in all_keys():
        meaning = field.description or told.get(key) or told.get(key.removeprefix("methods.LABEL.")) or ""
        cells = (f"`{key}`", f"`{spelled(field.annotation)}`", default(field), re.sub(r"(?<!\\)\|", r"\|", meaning))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "needed"
    return "" if value is None or value in ((), {}) else f"`{spelled_value(value)}`"


def spelled_value(value: Any) -> str:
    """As TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return f"[{', '.join(map(spelled_value, value))}]" if isinstance(value, tuple) else str(value)


def spelled(hint: Any) -> str:
    """A type in the words of a config."""
    if get_origin(hint) is Annotated:
        return spelled(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(spelled(part) for part in get_args(hint) if part is not types.NoneType))
    if get_origin(hint) is Literal:
        return ", ".join(map(spelled_value, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"list of {spelled(get_args(hint)[0])}s"
    if get_origin(hint) is dict:
        return "table"
    words = {int: "whole number", float: "number", str: "text", bool: "true, false", Path: "path", dict: "table"}
    return words.get(hint, "table")


def described(page: str) -> dict[str, str]:
    """Key -> meaning, from the tables of docs/configuration.md; `split.clients, .classes` are two keys."""
    found: dict[str, str] = {}
    for row in re.findall(r"^\|(.+)\|$", page, re.M):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
        first = ""
        for key in cells[0].replace("`", "").split(", "):
            first = first or key
            full = f"{first.partition('.')[0]}{key}" if key.startswith(".") else key
            found.setdefault(full, cells[-1].replace("](#", "](configuration.md#"))
    return found


def names_page() -> str:
    """Every name of `qupel`, from its docstring."""
    lines = ["# Every public name", "", "What `import qupel` offers; [parts](parts.md) lists what goes by a name.", ""]
    return "\n\n".join([*lines, *(f"::: qupel.{name}" for name in qupel.__all__)]) + "\n"
