"""A comparison: federations x methods x bits x seeds, from one file to ordinary configs, a run directory each.

RUN/compare.json                  what was asked for: file, reference, federations, methods
RUN/<federation>/                 a run directory (`folder`); search.json in it: what was tried, and what was chosen
RUN/search/<federation>/          the trials, a run directory without test data
RUN/leaderboard.{json,md,html}    what came out (`report.leaderboard`)

The settings of every method are chosen by the same search: as many trials for each, on validation data; test data are
not even given to it. Directories grow: methods and seeds that a file gains are added to what is there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from qupel.report.runs import AT, place
from qupel.run.config import Bits, Config, check_bits, explain, find_modules_in, merge, read_toml, validate
from qupel.run.sections import Strict
from qupel.util.errors import UserError

SEARCH = "search"  # the folder of trials, so no federation's name
Table = dict[str, Any]
Choices = Mapping[str, Table]  # method -> its chosen settings


def grid(rows: Mapping[str, Table], columns: Mapping[str, Table]) -> dict[str, Table]:
    """The methods "row @ column": both are parts of a method's settings, and a row may name the `columns` it has."""
    methods: dict[str, Table] = {}
    for row, about in rows.items():
        own = {k: v for k, v in about.items() if k != "columns"}
        methods |= {row + AT + c: {**columns[c], **own} for c in about.get("columns", list(columns))}
    return methods


def column(bits: int) -> str:
    return f"{bits} bit{'s' * (bits > 1)}"


class Search(Strict):
    """The same small search for every method, on validation data."""

    trials: int = Field(ge=1, description="of every method")
    seed: int = Field(100, description="none of those that are compared")
    validation: float = Field(0.25, gt=0, lt=1, description="share of each client's training data that judges a trial")
    bits: Bits | None = Field(None, description="at which a method is tried that has them; others at their first")
    rounds: float = Field(1.0, gt=0, le=1, description="of a trial, as a share of the federation's")
    settings: dict[str, list[Any]] | list[Table] = Field(
        {}, description="tried for methods without a search of their own"
    )


class Entry(Strict):
    """A method of the file, besides what a config has of it."""

    bits: tuple[Bits, ...] | None = Field(None, description="those it can have; by default the file's")
    afterwards: Literal["kmeans", "range", "quantile", "aciq"] | None = Field(
        None, description="it ships full precision, and is quantized afterwards to the other bits"
    )
    search: dict[str, list[Any]] | list[Table] = Field({}, description="a grid of values, or a list of settings")


class Sheet(Strict):
    """The file itself."""

    seeds: tuple[int, ...] = (0,)
    bits: tuple[Bits, ...] = (32, 3, 2, 1)
    reference: str | None = Field(None, description="the method that others are compared with; by default the first")
    settings: Table = Field({}, description="shared by all methods of all federations")
    federations: dict[str, Table] = Field(description="a partial config each; `only`: the methods it has")
    methods: dict[str, Table] = Field(description="as in a config, and what an `Entry` has")
    search: Search | None = None


@dataclass(frozen=True)
class Comparison:
    """A checked file. tables: what a config has of every method; entries: the rest."""

    sheet: Sheet
    entries: Mapping[str, Entry]
    tables: Mapping[str, Table]
    where: str
    data: Path | None = None

    @property
    def reference(self) -> str:
        return self.sheet.reference or next(iter(self.sheet.methods))

    def methods_of(self, federation: str) -> list[str]:
        return list(self.sheet.federations[federation].get("only", self.tables))

    def bits_of(self, federation: str, method: str) -> tuple[int, ...]:
        return self.entries[method].bits or tuple(self.sheet.federations[federation].get("bits", self.sheet.bits))

    def config(self, federation: str, methods: Sequence[str], choices: Choices) -> Config:
        """The federation's run: these methods at all of their bits, with the settings that were chosen."""
        made: dict[str, Table] = {}
        for name in methods:
            table, bits = merged(self.tables[name], choices.get(name, {})), self.bits_of(federation, name)
            if (how := self.entries[name].afterwards) is None:
                made |= grid({name: table}, {column(b): {"bits": b} for b in bits})
                continue
            whole = {"columns": [column(32)], **table}
            made |= grid({name: whole}, {column(32): {"bits": 32}})
            after = {column(b): {"of": name + AT + column(32), "afterwards": how, "bits": b} for b in bits if b != 32}
            made |= grid({name: {}}, after)
        return self._validated(federation, {"methods": made})

    def trials(self, federation: str, methods: Sequence[str]) -> tuple[Config, dict[str, list[Table]]]:
        """The search's run, blind for test data, and what it tries: "method @ trial 1" and so on."""
        search = self.sheet.search
        assert search is not None
        made, tried = {}, {name: list(settings_of(self, name)) for name in methods}
        for name in methods:
            able = (32,) if self.entries[name].afterwards else self.bits_of(federation, name)
            bits = search.bits if search.bits in able else able[0]
            for k, settings in enumerate(tried[name], 1):
                made[f"{name}{AT}trial {k}"] = {**merged(self.tables[name], settings), "bits": bits}
        split = {"validation": search.validation, "blind": True}
        over = {"seeds": [search.seed], "split": split, "methods": made, "save_models": False}
        rounds = max(1, round(search.rounds * self._validated(federation, over).rounds))
        return self._validated(federation, {**over, "rounds": rounds}), tried

    def _validated(self, federation: str, over: Table) -> Config:
        own = {k: v for k, v in self.sheet.federations[federation].items() if k not in ("only", "bits")}
        data = {} if self.data is None else {"data": {"folder": str(self.data)}}
        raw = merge({"seeds": self.sheet.seeds, "settings": self.sheet.settings}, merge(own, merge(data, over)))
        return validate(raw, f"{self.where}, {federation}")

    def described(self) -> Table:
        """RUN/compare.json: what the leaderboard says of the comparison as a whole."""
        methods = {name: {"afterwards": entry.afterwards, **self.tables[name]} for name, entry in self.entries.items()}
        search = None if self.sheet.search is None else self.sheet.search.model_dump(exclude={"settings"})
        told = {"file": self.where, "reference": self.reference, "federations": list(self.sheet.federations)}
        return {**told, "methods": methods, "search": search}


def merged(table: Table, settings: Mapping[str, Any]) -> Table:
    """A method with settings, also those of its parts: {"method.lambda_p": 1} of method = "ditto"."""
    found = dict(table)
    for key, value in settings.items():
        part, _, rest = key.partition(".")
        if rest:
            known = found.get(part, {})
            found[part] = {**({"name": known} if isinstance(known, str) else known), rest: value}
        else:
            found[key] = value
    return found


def settings_of(c: Comparison, method: str) -> Iterator[Table]:
    """The trials of a method: the product of a grid's values, or a list as it is."""
    assert c.sheet.search is not None
    given = c.entries[method].search or c.sheet.search.settings
    if isinstance(given, list):
        yield from given
        return
    for values in itertools.product(*given.values()):
        yield dict(zip(given, values, strict=True))


# --- the file ---


def load(path: Path, data: Path | None = None) -> Comparison:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read {path}: {e.strerror if isinstance(e, OSError) else 'not a text file'}") from None
    find_modules_in(path.resolve().parent)
    return parse(text, path.name if path.is_absolute() else str(path), data)


def parse(text: str, where: str, data: Path | None = None) -> Comparison:
    """A comparison from TOML text. Every mistake in it is found here, those of its configs included."""
    try:
        sheet = Sheet.model_validate_json(json.dumps(read_toml(text, where), default=str))
    except ValidationError as e:
        raise UserError(f"{where}: {explain(e)}") from None
    entries, tables = {}, {}
    for name, table in sheet.methods.items():
        try:
            mine = {k: v for k, v in table.items() if k in Entry.model_fields}
            entries[name] = Entry.model_validate_json(json.dumps(mine))
        except ValidationError as e:
            raise UserError(f"{where}: methods.{name}: {explain(e)}") from None
        tables[name] = {k: v for k, v in table.items() if k not in Entry.model_fields}
    found = Comparison(sheet, entries, tables, where, data)
    _check(found)
    return found


def _check(c: Comparison) -> None:
    sheet = c.sheet
    if not (sheet.federations and sheet.methods and sheet.bits):
        raise UserError(f"{c.where}: at least one federation, one method and one number of bits are needed")
    names = [*sheet.federations, *sheet.methods]
    for name in names:
        if names.count(name) > 1 or AT in name or "/" in name or name.startswith(".") or name == SEARCH:
            raise UserError(
                f"{c.where}: {name!r}: a name is one federation's or one method's, not {SEARCH!r}, no / in it"
            )
    if c.reference not in sheet.methods:
        raise UserError(f"{c.where}: reference = {c.reference!r}; allowed: {', '.join(sheet.methods)}")
    for federation, own in sheet.federations.items():
        if unknown := [m for m in own.get("only", ()) if m not in sheet.methods]:
            raise UserError(f"{c.where}: federations.{federation}.only: {unknown[0]!r} is no method of the file")
        for method in c.methods_of(federation):
            check_bits(c.bits_of(federation, method))
        c.config(federation, c.methods_of(federation), {})
        if sheet.search is not None:
            if sheet.search.seed in own.get("seeds", sheet.seeds):
                raise UserError(f"{c.where}: search.seed = {sheet.search.seed} is one of the seeds that are compared")
            _, tried = c.trials(federation, c.methods_of(federation))
            for method, settings in tried.items():
                if len(settings) != sheet.search.trials:
                    raise UserError(
                        f"{c.where}: methods.{method}.search has {len(settings)} settings; every method has the same "
                        f"number of trials, {sheet.search.trials}"
                    )


# --- a part of it ---


@dataclass(frozen=True)
class Part:
    """Which federations, methods, columns and seeds are wanted; an empty list: all."""

    federations: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset()
    columns: frozenset[str] = frozenset()
    seeds: frozenset[int] = frozenset()

    @classmethod
    def of(cls, c: Comparison, only: Iterable[str]) -> Part:
        """From words: a federation, a method, "2 bits", "seed 0"."""
        widths = {column(b) for f in c.sheet.federations for m in c.methods_of(f) for b in c.bits_of(f, m)}
        seeds = {s for own in c.sheet.federations.values() for s in own.get("seeds", c.sheet.seeds)}
        return cls.named(only, c.sheet.methods, sorted(widths), sorted(seeds), c.sheet.federations)

    @classmethod
    def named(
        cls,
        only: Iterable[str],
        methods: Iterable[str],
        columns: Iterable[str],
        seeds: Iterable[int],
        federations: Iterable[str] = (),
    ) -> Part:
        """From words, of which these are allowed."""
        names = {"federations": federations, "methods": methods, "columns": columns}
        known: dict[str, tuple[str, Any]] = {word: (kind, word) for kind, words in names.items() for word in words}
        known |= {f"seed {s}": ("seeds", s) for s in seeds}
        kinds: dict[str, set[Any]] = {}
        for word in only:
            if word not in known:
                raise UserError(f"--only {word!r}: allowed are {', '.join(known)}")
            kind, value = known[word]
            kinds.setdefault(kind, set()).add(value)
        return cls(**{kind: frozenset(words) for kind, words in kinds.items()})

    def has(self, label: str, seed: int) -> bool:
        """Whether a cell of a federation is in it."""
        method, width = place(label)
        wanted = ((self.methods, method), (self.columns, width), (self.seeds, seed))
        return all(not those or this in those for those, this in wanted)


def federations(c: Comparison, part: Part) -> list[tuple[str, list[str]]]:
    """(federation, its methods) that are wanted."""
    found = [f for f in c.sheet.federations if not part.federations or f in part.federations]
    return [(f, [m for m in c.methods_of(f) if not part.methods or m in part.methods]) for f in found]
