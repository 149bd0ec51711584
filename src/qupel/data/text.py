"""Text as whole numbers: windows of characters for next-character prediction, sentences as words; who says what."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from qupel.data.natural import TEST_SHARE, Owner, Samples, find_file, first, gather, read_bytes
from qupel.data.sources import Dataset, Folder, datasets
from qupel.util.errors import UserError

PADDING, UNKNOWN = 0, 1  # numbers of words that are none


def alphabet(texts: Iterable[str], others: str = "") -> str:
    """The characters in these texts, sorted: character k has the number k."""
    return "".join(sorted(set(others).union(*texts)))


def encode(text: str, letters: str) -> Tensor:
    """A text as the numbers of its characters, int64 (len(text),); every one of them must be among the letters."""
    codes, known = (np.frombuffer(t.encode("utf-32-le"), np.uint32) for t in (text, letters))
    return torch.from_numpy(np.searchsorted(known, codes).astype(np.int64))


def shown(letters: str) -> tuple[str, ...]:
    """Names of the classes: a character as itself, a line break and the like as they are written in code."""
    return tuple(c if c.isprintable() else repr(c)[1:-1] for c in letters)


def windows(codes: Tensor, length: int, stride: int) -> Samples:
    """Every `stride`-th window of `length` characters (n, length), and the character after each (n,)."""
    cut = codes.unfold(0, length + 1, stride)
    return cut[:, :-1].contiguous(), cut[:, -1].contiguous()


@datasets.register("roles", about="264 roles of Shakespeare: the next character after 80")
def roles(
    folder: Folder = None,
    limit: int | None = None,
    roles: int | None = None,
    others: int = 0,
    length: int = 80,
    stride: int = 20,
) -> Dataset:
    """Next-character prediction by role. The last fifth of each role's text is to test with; no window reaches over.

    File: FOLDER/shakespeare/roles.jsonl[.gz], a line {"role": ..., "text": ...} for each. The alphabet is that of the
    whole file, whoever is chosen.
    roles, others: only the first so many roles; then so many that take no part in training (`Dataset.unseen`).
    length: characters of a window; stride: from one window's start to the next's, 1 for all there are.
    """
    for name, value in (("length", length), ("stride", stride)):
        if value < 1:
            raise UserError(f"{name} = {value}: at least 1")
    path = find_file("roles", folder, ("shakespeare", "roles"), ("roles.jsonl.gz", "roles.jsonl"))
    spoken: dict[str, str] = {}
    for k, line in enumerate(read_bytes(path).decode(errors="replace").splitlines(), 1):
        try:
            told = json.loads(line)
            spoken[str(told["role"])] = str(told["text"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f'{path} line {k}: needed is {{"role": ..., "text": ...}}') from None
    letters = alphabet(spoken.values())
    seen = len(spoken) - others if roles is None else roles
    names = first(seen + others if seen >= 0 else seen, list(spoken), "roles and others together")
    owners = []
    for k, name in enumerate(names):
        codes = encode(spoken[name], letters)
        held = len(codes) // TEST_SHARE
        if held <= length:
            raise UserError(f"{path}: {name} says {len(codes)} characters; windows of {length} need more")
        train, test = (windows(part, length, stride) for part in (codes[:-held], codes[-held:]))
        owners.append(Owner(name, train, test, unseen=k >= seen))
    return gather("roles", owners, limit, classes=len(letters), labels=shown(letters), mirror=False)


def split_words(text: str) -> list[str]:
    """Words and marks, in small letters."""
    return re.findall(r"[\w']+|[.,!?;]", text.lower())


def words(texts: Iterable[str], most: int) -> dict[str, int]:
    """Numbers of the most frequent words, from 2 on; `most` numbers in all, with padding and unknown words."""
    counts = Counter(word for text in texts for word in split_words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: most - 2]
    return {word: k for k, word in enumerate(ranked, 2)}


def encode_words(texts: Sequence[str], numbers: dict[str, int], length: int) -> Tensor:
    """The first `length` words of each text, int64 (n, length), short ones padded in front."""
    found = torch.full((len(texts), length), PADDING)
    for row, text in zip(found, texts, strict=True):
        said = [numbers.get(word, UNKNOWN) for word in split_words(text)[:length]]
        if said:
            row[-len(said) :] = torch.tensor(said)
    return found
