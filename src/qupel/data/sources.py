"""Data sets as tensors in memory: the known image sets, the user's own `.npz` file, the user's own arrays."""

import hashlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qupel.data import checks, images, npz
from qupel.data.samples import Arrays, Samples, shape_of
from qupel.data.scale import scale_of
from qupel.tasks.trees import leaves
from qupel.util.errors import UserError
from qupel.util.registry import Registry

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A train and a test set.

    owners     names of the clients whose samples these are, in the order of their numbers in `groups`; () where who
               gets what is for a split to say
    classes    number of classes when targets are labels, else None
    labels     names of the classes, or ()
    mean, std  per channel of the train images, as fractions of 255; of float inputs where they are to be standardized,
               else (): they are used as they are
    mirror     a mirrored image keeps its label (false for digits), so that augmentation may flip it
    note       what to say beside a number measured on this data
    unseen     numbers of owners that take no part in training: clients that join later
    """

    name: str
    train: Samples
    test: Samples
    classes: int | None
    labels: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    mirror: bool = True
    note: str = ""
    owners: tuple[str, ...] = ()
    unseen: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input; () where a sample has several."""
        return shape_of(self.train)


def identity(data: Dataset) -> str:
    """A checksum of everything that is learned from or judged on; of what is not in memory, of a few rows."""
    found = hashlib.sha256()
    for samples in (data.train, data.test):
        samples.mark(found)
    return found.hexdigest()


@dataclass(frozen=True)
class _Images:
    """A known image set: where it lives on the Hugging Face hub and what it must look like."""

    line: str
    hub: str
    shape: tuple[int, int, int]  # (C, H, W)
    labels: tuple[str, ...]
    mirror: bool = True


_DIGITS = tuple("0123456789")
_CIFAR100 = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm"""
_IMAGES = {
    "cifar10": _Images(
        "60,000 colour photographs of 32x32, 10 classes",
        "uoft-cs/cifar10",
        (3, 32, 32),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": _Images(
        "60,000 colour photographs of 32x32, 100 classes", "uoft-cs/cifar100", (3, 32, 32), tuple(_CIFAR100.split())
    ),
    "mnist": _Images(
        "70,000 grey handwritten digits of 28x28, 10 classes", "ylecun/mnist", (1, 28, 28), _DIGITS, mirror=False
    ),
    "fashion_mnist": _Images(
        "70,000 grey pictures of clothes of 28x28, 10 classes",
        "zalando-datasets/fashion_mnist",
        (1, 28, 28),
        ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
}
Folder = str | os.PathLike[str] | None
datasets: Registry[Callable[..., Dataset]] = Registry("data set")
NPZ, FOLDER = "PATH.npz", "FOLDER/"  # stand in lists for the user's own file, or a file for each client
LEAF = "leaf:"  # before the folder of LEAF's files


def load(name: str, folder: Folder = None, limit: int | None = None, args: Mapping[str, Any] | None = None) -> Dataset:
    """The data set `name`: a registered one, the path of an `.npz` file, a folder with a file for each client, or
    "module:function" of your own (`data.own`).

    folder  where Parquet files are looked for: FOLDER/NAME/*.parquet or FOLDER/*.parquet; by default QUPEL_DATA
    limit   take only the first `limit` samples of each split; of data that come as clients, of each client
    args    settings of a registered data set, or what a function of your own is called with
    """
    from qupel.data import own  # which makes data sets of what it finds

    given = dict(args or {})

    if limit is not None and limit < 1:
        raise UserError(f"limit {limit}: at least 1")
    if name.startswith(LEAF):
        return replace(_registered("leaf", name.removeprefix(LEAF), limit, given), name=name)
    if is_known(name):
        return _registered(_key(name), folder, limit, given)
    if given and ":" not in name:
        raise UserError(f'data.args are for a data set of `qupel datasets` or for "module:function", not for {name!r}')
    if name.endswith(".npz"):
        return _first(from_npz(name), limit)
    if name.endswith(("/", os.sep)) or Path(name).expanduser().is_dir():
        path = Path(name).expanduser()
        if not path.is_dir():
            raise UserError(f"data folder {name} does not exist or is not a folder")
        return _first(own.from_folder(path), limit)
    if ":" not in name:
        known = ", ".join((*datasets, NPZ, FOLDER))
        raise UserError(f'unknown data set {name!r}; known are {known}, or "module:function"')
    return _first(own.from_function(name, datasets[name], args or {}), limit)


def _registered(name: str, folder: Folder, limit: int | None, args: dict[str, Any]) -> Dataset:
    """args: those that the data set's function takes beside folder and limit."""
    loader = datasets[name]
    known = [key for key in inspect.signature(loader).parameters if key not in ("folder", "limit", "name")]
    if unknown := [key for key in args if key not in known]:
        allowed = f"allowed: {', '.join(known)}" if known else "it has none"
        raise UserError(f"data.args.{unknown[0]}: unknown setting of {name}; {allowed}")
    return loader(folder, limit, **args)


def is_known(name: str) -> bool:
    """Whether this is the name of a data set, and not the path of a file."""
    return _key(name) in datasets


def _key(name: str) -> str:
    """CIFAR-10, cifar_10 -> cifar10; fashion-mnist, FashionMNIST -> fashion_mnist."""
    squeezed = name.lower().replace("-", "").replace("_", "")
    return next((known for known in datasets if known.replace("_", "") == squeezed), squeezed)


def _first(dataset: Dataset, limit: int | None) -> Dataset:
    if limit is None:
        return dataset
    train, test = (
        split.take(_first_rows(split, limit, bool(dataset.owners))) for split in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test)


def _first_rows(split: Samples, limit: int, of_each_owner: bool) -> np.ndarray:
    if not of_each_owner or split.groups is None:
        return np.arange(min(limit, len(split)))
    groups = np.asarray(split.groups)
    return np.sort(np.concatenate([np.flatnonzero(groups == owner)[:limit] for owner in np.unique(groups)]))


@datasets.register("digits", about="1,797 grey handwritten digits of 8x8, 10 classes; needs no files")
def _digits(folder: Folder = None, limit: int | None = None) -> Dataset:
    """scikit-learn's digits as float32 (n, 1, 8, 8) in [0, 1]; every fourth sample of each class is for testing."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    inputs, targets = bunch.images[order].astype(np.float32)[:, None] / 16, bunch.target[order].astype(np.int64)
    testing = np.zeros(len(targets), bool)
    for label in range(10):
        testing[np.flatnonzero(targets == label)[3::4]] = True
    train, test = (Arrays(torch.from_numpy(inputs[m]), torch.from_numpy(targets[m])) for m in (~testing, testing))
    return _first(Dataset("digits", train, test, classes=10, labels=_DIGITS, mirror=False), limit)


def _image_set(name: str, folder: str | os.PathLike[str] | None, limit: int | None) -> Dataset:
    known = _IMAGES[name]
    wanted = images.Wanted(name, known.shape, len(known.labels), limit)
    files = _find(name, folder)
    if files is not None:
        splits = {split: images.read(paths, split, wanted) for split, paths in files.items()}
    else:
        splits = _fetch(known.hub, wanted)
    train, test = (
        Arrays(torch.from_numpy(splits[s].images), torch.from_numpy(splits[s].labels)) for s in ("train", "test")
    )
    mean, std = scale_of(train, unit=255)
    note = ""
    if any("JPEG" in split.encodings for split in splits.values()):
        note = f"JPEG copy of {name}: re-encoded with loss, not the original pixels"
    return Dataset(name, train, test, len(known.labels), known.labels, mean, std, known.mirror, note)


for _name, _known in _IMAGES.items():
    datasets.register(_name, about=_known.line)(partial(_image_set, _name))


def _find(name: str, folder: str | os.PathLike[str] | None) -> dict[str, list[Path]] | None:
    """The Parquet files of each split; None when no folder was asked for and the `datasets` package can fetch them."""
    asked = folder if folder is not None else os.environ.get("QUPEL_DATA") or None
    looked = "no data folder is set"
    if asked is not None:
        base = Path(asked).expanduser()
        if not base.is_dir():
            raise UserError(f"data folder {base} does not exist or is not a folder; set --data or QUPEL_DATA")
        named = sorted(path for path in base.iterdir() if path.is_dir() and _key(path.name) == name)
        for place in named:
            found = images.shards(place, name)
            if found is not None:
                return found
        if named:
            raise UserError(f"{named[0]}: holds no train-*.parquet and test-*.parquet")
        other = _key(base.name)
        if other not in _IMAGES or other == name:  # FOLDER may be the data set itself, but not another one's
            found = images.shards(base, name)
            if found is not None:
                return found
        looked = f"looked for {base / name}/*.parquet and {base}/*.parquet"
    if folder is None and _has_datasets():
        return None
    raise UserError(
        f"data set {name} not found: {looked}; set --data FOLDER (or QUPEL_DATA) to a folder with "
        f"{name}/train-*.parquet and {name}/test-*.parquet, or pip install 'qupel[datasets]' to have it fetched"
    )


def _has_datasets() -> bool:
    try:
        import datasets  # noqa: F401
    except ImportError:
        return False
    return True


def _fetch(hub: str, wanted: images.Wanted) -> dict[str, images.Split]:
    """The splits, fetched by the `datasets` package (which keeps its own copy of the files)."""
    import datasets

    log.info("fetching %s from the Hugging Face hub", hub)
    try:
        loaded = datasets.load_dataset(hub)
    except Exception as error:  # no network, no such set, no space: the package raises many kinds
        raise UserError(
            f"{hub} could not be fetched ({images.line(error)}); give a folder with --data or QUPEL_DATA"
        ) from error
    splits = {}
    for name in ("train", "test"):
        split = loaded[name]
        column = next((c for c in images.IMAGE_COLUMNS if c in split.column_names), None)
        if column is None:
            raise UserError(f"{hub}: no column named {' or '.join(images.IMAGE_COLUMNS)}")
        raw = split.cast_column(column, datasets.Image(decode=False)).with_format("arrow")
        files = [Path(file["filename"]) for file in split.cache_files]

        def build(raw: Any = raw, name: str = name) -> images.Split:
            starts = range(0, len(raw), 1000)
            parts = ((start, raw[start : start + 1000].combine_chunks().to_batches()[0]) for start in starts)
            return images.decode(((f"{hub} {name}", start, batch) for start, batch in parts), hub, wanted)

        splits[name] = images.cached(files, name, wanted, build)
    return splits


NPZ_NAMES = (
    ("train_inputs", "train_targets", "test_inputs", "test_targets"),
    ("x_train", "y_train", "x_test", "y_test"),
)


def _wanted(held: list[str]) -> list[str]:
    """Of the names in an .npz file those that make a data set."""
    names = next((names for names in NPZ_NAMES if all(name in held for name in names)), None)
    if names is None:
        needed = " or ".join(", ".join(names) for names in NPZ_NAMES)
        raise UserError(f"holds {', '.join(held[:20]) or 'nothing'}; needed are {needed}")
    return [*names, *(name for name in ("train_groups", "test_groups", "classes") if name in held)]


def from_npz(path: str | os.PathLike[str]) -> Dataset:
    """A data set from the user's `.npz` file (never unpickled).

    It holds train_inputs, train_targets, test_inputs, test_targets (or x_train, y_train, x_test, y_test); optionally
    train_groups and test_groups, and the number `classes`. See `from_arrays` for what is allowed in them.
    """
    path = Path(path).expanduser()
    held = npz.read(path, _wanted)
    names = next(names for names in NPZ_NAMES if all(name in held for name in names))
    classes = held.get("classes")
    if classes is not None and (classes.ndim or not np.issubdtype(classes.dtype, np.integer)):
        raise UserError(f"{path}: classes must be one whole number")
    try:
        return from_arrays(
            *(held[name] for name in names),
            train_groups=held.get("train_groups"),
            test_groups=held.get("test_groups"),
            classes=None if classes is None else int(classes),
            name=path.stem,
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def from_arrays(
    train_inputs: Any,
    train_targets: Any,
    test_inputs: Any,
    test_targets: Any,
    *,
    train_groups: Any = None,
    test_groups: Any = None,
    classes: int | None = None,
    labels: tuple[str, ...] = (),
    name: str = "arrays",
    mirror: bool = True,
) -> Dataset:
    """A data set from arrays or tensors, or from dicts or tuples of them; a memory-mapped array stays in its file.

    inputs   uint8 (n, C, H, W), (n, H, W, C) or (n, H, W) are images. Of four dimensions the channels are the last when
             the last has size 1, 3 or 4 and the second has not; otherwise they are the second. Other whole numbers
             (tokens) become int64, everything else float32, used as it is.
    targets  whole numbers (n,) or (n, 1) are labels 0..classes-1; whole numbers of other shapes stay whole numbers,
             floats become float32. With `classes` given, targets (n,) of any number type are labels.
    groups   whole numbers or strings (n,)
    """
    inputs = checks.inputs("train_inputs", train_inputs), checks.inputs("test_inputs", test_inputs)
    counts = [len(leaves(x)[0]) for x in inputs]
    named = ("train_targets", train_targets, counts[0]), ("test_targets", test_targets, counts[1])
    train, test = (checks.targets(what, values, rows, classes) for what, values, rows in named)
    groups = checks.groups(train_groups, test_groups, *counts)
    splits = Arrays(inputs[0], train, groups[0]), Arrays(inputs[1], test, groups[1])
    same_kind("train and test", *splits)
    return from_samples(*splits, classes=classes, labels=labels, name=name, mirror=mirror)


def same_kind(who: str, one: Samples, other: Samples) -> None:
    """Refuse samples of two kinds."""
    inputs, targets = zip(one.kinds, other.kinds, strict=True)
    for what, kinds in (("inputs", inputs), ("targets", targets)):
        if kinds[0] != kinds[1]:
            shown = " and ".join(str(kind_in_words(kind)) for kind in kinds)
            hint = "" if what == "inputs" else "; both labels, or both numbers of one shape"
            raise UserError(f"{who} {what} differ in kind: {shown}{hint}")


def kind_in_words(kind: Any) -> str:
    """
    >>> kind_in_words({"ids": (torch.int64, (5,)), "mask": (torch.bool, (5,))})
    'ids: int64 (5,), mask: bool (5,)'
    """
    if isinstance(kind, dict):
        return ", ".join(f"{key}: {kind_in_words(part)}" for key, part in kind.items())
    if isinstance(kind[0], torch.dtype):
        return f"{kind[0]} {tuple(kind[1])}".removeprefix("torch.")
    return ", ".join(map(kind_in_words, kind))


def from_samples(
    train: Samples,
    test: Samples,
    *,
    classes: int | None = None,
    labels: tuple[str, ...] = (),
    name: str = "samples",
    mirror: bool = True,
    owners: tuple[str, ...] = (),
) -> Dataset:
    """A data set from samples of any kind; where all their labels are known, with the number of classes."""
    if classes is None and train.labels is not None and test.labels is not None:
        classes = 1 + max(int(known.max()) for known in (train.labels, test.labels))
        if classes > max(1000, len(train) + len(test)):
            raise UserError(f"labels go up to {classes - 1}: more classes than samples; number them 0, 1, 2, ...")
    if labels and len(labels) != classes:
        raise UserError(f"{len(labels)} names of classes for {classes} classes")
    kind = train.kinds[0]
    mean, std = scale_of(train, unit=255) if isinstance(kind, tuple) and kind[0] == torch.uint8 else ((), ())
    return Dataset(name, train, test, classes, tuple(labels), mean, std, mirror, owners=owners)
