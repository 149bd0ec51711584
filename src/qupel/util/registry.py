"""Parts by name. A part registers itself where it is written, and that is the only place that names it:

    @methods.register("ditto", paper="Li et al., ICML 2021")
    @dataclass(frozen=True)
    class Ditto: ...

Lists, docs, configs and the tests' tables are made from the registries. A part of your own needs no registration: its
import path, "my_package.module:Name", is its name; an installed package may also offer parts by an entry point.
"""

from __future__ import annotations

import difflib
import inspect
import json
import pkgutil
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from qupel.util.errors import UserError

T = TypeVar("T")
REGISTRIES: dict[str, Registry[Any]] = {}


@dataclass(frozen=True)
class Entry(Generic[T]):
    """What is known of a part: its name, the class or function, where it is from, what it is in one line."""

    name: str
    part: T
    paper: str
    about: str


class Registry(Generic[T]):
    """The parts of one kind. package: where the built-in ones live, a file each; they are loaded when first asked for.
    kind: a word for messages, and the name of the entry points, `qupel.<kind>`."""

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind, self.package = kind, package
        self.entries: dict[str, Entry[T]] = {}
        self.complete = False
        self.protocol: Any = None  # what a field that holds such a part is annotated with
        REGISTRIES[kind] = self

    def register(self, name: str, *, paper: str = "", about: str = "") -> Callable[[T], T]:
        def keep(part: T) -> T:
            known = self.entries.get(name)
            if known is not None and _home(known.part) != _home(part):  # the same one: its module is loaded again
                raise UserError(f"{self.kind} {name!r} is there already, from {known.part.__module__}")
            self.entries[name] = Entry(name, part, paper, about or first_sentence(part))
            return part

        return keep

    def all(self) -> dict[str, Entry[T]]:
        """Every registered part, the built-in ones first."""
        if not self.complete:
            self.complete = True
            if self.package is not None:
                for module in pkgutil.iter_modules(import_module(self.package).__path__):
                    import_module(f"{self.package}.{module.name}")
                self.entries = dict(sorted(self.entries.items()))  # whichever was loaded first
            for point in entry_points(group=f"qupel.{self.kind}"):
                self.entries.setdefault(point.name, Entry(point.name, part := point.load(), "", first_sentence(part)))
        return self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())

    def __contains__(self, name: object) -> bool:
        return name in self.all()

    def __getitem__(self, name: str) -> T:
        """A part by its name, or by its import path."""
        if name in self.all():
            return self.entries[name].part
        if ":" in name:
            return imported(name, self.kind)
        near = difflib.get_close_matches(name, self.entries, 2)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        own = '"module:Name" of your own'
        raise UserError(f"unknown {self.kind} {name!r}{hint}; allowed: {', '.join(self.entries)}, or {own}")

    def name_of(self, part: Any) -> str:
        """The name that gives this part, or the class of this part, again."""
        kind = part if inspect.isclass(part) or inspect.isfunction(part) else type(part)
        for entry in self.all().values():
            if entry.part is kind:
                return entry.name
        return f"{kind.__module__}:{kind.__qualname__}"

    def build(self, given: Any, where: str) -> Any:
        """A part from what a config gives: a name, or a table of its settings with its `name`."""
        if is_dataclass(given):
            return given  # made already
        if not isinstance(given, str | dict):
            raise UserError(f"{where}: a name or a table is needed, not {given!r}")
        table = {"name": given} if isinstance(given, str) else dict(given)
        name = table.pop("name", None)
        if not isinstance(name, str):
            raise UserError(f"{where}: a name is missing; allowed: {', '.join(self)}")
        try:
            part: Any = self[name]
        except UserError as e:
            raise type(e)(f"{where}: {e}") from None
        if not is_dataclass(part):
            raise UserError(f"{where}: {name} is no frozen dataclass, so it cannot have settings")
        return from_table(part, table, where)

    def describe(self, part: Any) -> dict[str, Any]:
        """The table that `build` makes the same part of, as JSON."""
        return {"name": self.name_of(part), **as_table(part)}


def _home(part: Any) -> tuple[str, str]:
    return part.__module__, part.__qualname__


def parts_page(kinds: Iterable[Registry[Any]]) -> str:
    """docs/parts.md: every registered part of these kinds, with its settings."""
    lines = ["# Parts", "", "Made by `qupel methods --markdown` from what is registered; a test compares."]
    for kind in kinds:
        lines += ["", f"## {kind.kind.capitalize()}s", "", "| name | what | from | settings |", "|---|---|---|---|"]
        for entry in kind.all().values():
            part: Any = entry.part
            known = is_dataclass(part) and isinstance(part, type)
            settings = ", ".join(f.name for f in fields(part) if f.init) if known else ""
            about = entry.about.replace("|", "\\|")
            lines.append(f"| {entry.name} | {about} | {entry.paper} | {settings} |")
    return "\n".join(lines)


def first_sentence(part: Any) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(part) or "").split("\n")[0]


_ALLOWED: ContextVar[frozenset[str] | None] = ContextVar("allowed imports", default=None)


@contextmanager
def imports_limited_to(modules: Iterable[str]) -> Iterator[None]:
    """Meanwhile a part's import path may name these modules only: whoever gives the path is not trusted."""
    token = _ALLOWED.set(frozenset(modules))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


class NotAllowed(UserError):
    """A path names a module that may not be imported here."""


def imported(path: str, kind: str) -> Any:
    """What "package.module:Name" names."""
    module, _, name = path.partition(":")
    allowed = _ALLOWED.get()
    if allowed is not None and module not in allowed:
        known = ", ".join(sorted(allowed)) or "none"
        raise NotAllowed(f"{kind} {path!r}: importing {module} is not allowed here; allowed: {known}")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as e:
        raise UserError(f"{kind} {path!r}: no module {e.name!r} on the Python path or beside the config") from None
    except AttributeError:
        raise UserError(f"{kind} {path!r}: {module} has no {name!r}") from None
    except Exception as e:  # whatever the user's module raises while it is loaded
        raise UserError(f"{kind} {path!r}: {module} fails to load: {type(e).__name__}: {e}") from None
    return found


# --- a dataclass from a table and back ---


def from_table(cls: Any, table: dict[str, Any], where: str) -> Any:
    """An instance of a dataclass from a table that is held to its fields' types: an unknown key, a wrong type or a
    value that is not allowed is an error that says where."""
    hints, known = _hints(cls), {f.name for f in fields(cls) if f.init}
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 2)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise UserError(f"{where}: unknown key {key!r}{hint}")
    usual = {f.name: f.default for f in fields(cls)}
    values = {}
    for key, value in table.items():
        registry = _registry(hints[key])
        if registry is not None and isinstance(value, dict) and "name" not in value and is_dataclass(usual[key]):
            value = {"name": registry.name_of(usual[key]), **value}  # settings of the usual part
        values[key] = _value(hints[key], value, f"{where}.{key}")
    try:
        return cls(**values)
    except TypeError:
        missing = [f.name for f in fields(cls) if f.init and f.name not in values]
        raise UserError(f"{where}: missing: {', '.join(missing)}") from None
    except ValueError as e:  # a part's own checks
        raise UserError(f"{where}: {e}") from None


def as_table(part: Any) -> dict[str, Any]:
    """A dataclass as JSON: its fields, of parts their `describe`, of dataclasses their tables."""
    cls: Any = type(part)
    return {f.name: _plain(_hints(cls)[f.name], getattr(part, f.name)) for f in fields(part) if f.init}


@lru_cache(maxsize=256)
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)  # names are looked up where each class of its bases is written


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)


def _registry(hint: Any) -> Registry[Any] | None:
    """The registry whose parts a field holds: its type is their protocol."""
    held = (r for r in REGISTRIES.values() if r.protocol is not None and r.protocol in _choices(hint))
    return next(held, None)


def _value(hint: Any, value: Any, where: str) -> Any:
    registry = _registry(hint)
    if registry is not None:
        return None if value is None and type(None) in _choices(hint) else registry.build(value, where)
    made = [choice for choice in _choices(hint) if is_dataclass(choice)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        for choice in made:
            if hasattr(choice, "constant"):
                return choice.constant(float(value))
    if isinstance(value, str) and value in {getattr(choice, "name", None) for choice in made}:
        value = {"name": value}  # "adam" is {name = "adam"}
    if isinstance(value, dict) and made:
        return from_table(_meant(made, value), value, where)
    try:  # through JSON: strict about types, yet a list is a tuple, as in TOML
        return _adapter(hint).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as e:
        first = e.errors()[0]
        said = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {said[0].lower()}{said[1:]}, not {value!r}") from None


def _meant(choices: list[Any], table: dict[str, Any]) -> Any:
    """Which of several dataclasses a table means: the one whose `name` it gives, then the one with most of its keys."""

    def score(choice: Any) -> tuple[bool, int]:
        return getattr(choice, "name", None) == table.get("name"), len({f.name for f in fields(choice)} & set(table))

    return max(choices, key=score)


@lru_cache(maxsize=256)
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _plain(hint: Any, value: Any) -> Any:
    registry = _registry(hint)
    if registry is not None and value is not None:
        return registry.describe(value)
    if is_dataclass(value) and not isinstance(value, type):
        return as_table(value)
    if isinstance(value, tuple | list):
        return [_plain(None, v) for v in value]
    return value
