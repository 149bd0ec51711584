"""Image sets in the Hugging Face Parquet layout: found, decoded once to uint8, kept in a cache.

A split is one or several files `train-*.parquet` / `test-*.parquet`, each with an image column (encoded bytes, plain or
as struct<bytes, path>) and an integer label column. Decoded splits are kept as `.npz` files in the cache folder
(`QUPEL_CACHE`, else `~/.cache/qupel`), keyed by names, sizes and times of the files they came from.
"""

import hashlib
import io
import logging
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from qupel.util.errors import UserError

log = logging.getLogger(__name__)

IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "fine_label")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")  # the decoders that files from elsewhere may reach
SUBFOLDERS = ("", "plain_text", "data", "default")
LAYOUT = 1  # raise it when the content of a cache file changes


@dataclass(frozen=True)
class Split:
    """One decoded split: `images` uint8 (n, C, H, W), `labels` int64 (n,), `encodings` as in "PNG" or "JPEG, PNG"."""

    images: np.ndarray
    labels: np.ndarray
    encodings: str


@dataclass(frozen=True)
class Wanted:
    """What a split must look like: `shape` = (C, H, W), labels in 0..classes-1; at most `limit` rows are read."""

    name: str
    shape: tuple[int, int, int]
    classes: int
    limit: int | None = None


def shards(folder: Path, config: str) -> dict[str, list[Path]] | None:
    """The Parquet files of each split in `folder` or one of its usual subfolders; None when there are none at all."""
    for sub in (*SUBFOLDERS, config):
        place = folder / sub
        found = {split: sorted(place.glob(f"{split}*.parquet")) for split in ("train", "test")}
        if not any(found.values()):
            continue
        for split, files in found.items():
            if not files:
                raise UserError(f"{place}: no {split}-*.parquet beside the other split; both train and test are needed")
            numbered = re.search(r"-of-(\d+)\.parquet$", files[0].name)
            if numbered and int(numbered[1]) != len(files):
                raise UserError(
                    f"{place}: {len(files)} of {int(numbered[1])} {split} files found; fetch the missing ones"
                )
        return found
    return None


def read(files: list[Path], split: str, wanted: Wanted) -> Split:
    """The decoded split of these Parquet files, from the cache when it holds them."""
    return cached(files, split, wanted, lambda: decode(_batches(files), files[0], wanted))


def cached(files: list[Path], split: str, wanted: Wanted, build: Callable[[], Split]) -> Split:
    """`build()`, or what an earlier call with the same files left in the cache. A cache that fails is not used."""
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]

    def place(limit: int | None) -> Path:
        key = hashlib.sha256(repr((LAYOUT, wanted.shape, stamps, limit)).encode()).hexdigest()[:16]
        return cache_folder() / f"{wanted.name}-{split}-{key}.npz"

    for limit in dict.fromkeys((None, wanted.limit)):  # the full split serves every limit
        kept = _load(place(limit))
        if kept is not None:
            stop = wanted.limit
            return Split(kept.images[:stop], kept.labels[:stop], kept.encodings)
    built = build()
    _save(place(wanted.limit), built)
    return built


def cache_folder() -> Path:
    """QUPEL_CACHE, else $XDG_CACHE_HOME/qupel, else ~/.cache/qupel."""
    if given := os.environ.get("QUPEL_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qupel"


def _load(path: Path) -> Split | None:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:  # npz members carry a checksum
            split = Split(file["images"], file["labels"], str(file["encodings"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        log.warning("cache file %s cannot be read (%s); decoding again", path, error)
        return None
    if split.images.dtype != np.uint8 or split.images.ndim != 4 or len(split.images) != len(split.labels):
        log.warning("cache file %s has an unexpected content; decoding again", path)
        return None
    return split


def _save(path: Path, split: Split) -> None:
    """Write to a temporary name, fsync, rename; on any failure (full disk, read-only) leave nothing behind."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            np.savez(file, images=split.images, labels=split.labels, encodings=np.array(split.encodings))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        log.warning("decoded images are not kept in %s (%s)", path.parent, error)
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _batches(files: list[Path]) -> Iterator[tuple[str, int, Any]]:
    """(file name, first row, record batch) of every 1,000 rows, in order."""
    for file in files:
        try:
            parquet = pq.ParquetFile(file)
            columns = [name for name in parquet.schema_arrow.names if name in IMAGE_COLUMNS + LABEL_COLUMNS]
            start = 0
            for batch in parquet.iter_batches(1000, columns=columns):
                yield file.name, start, batch
                start += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file}: not a readable Parquet file ({line(error)}); fetch it again") from error


def decode(batches: Iterable[tuple[str, int, Any]], place: object, wanted: Wanted) -> Split:
    """Images and labels of record batches (name, first row, batch), decoded by a pool of threads."""
    limit, rows = wanted.limit, 0
    images, labels, encodings, pending = [], [], set(), []
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for name, start, batch in batches:
            if limit is not None:
                batch = batch.slice(0, limit - rows)
            encoded, targets = _columns(name, start, batch, wanted)
            pending.append(pool.submit(_decode_all, encoded, name, start, wanted))
            labels.append(targets)
            rows += batch.num_rows
            if rows == limit:
                break
        for job in pending:
            decoded, formats = job.result()
            images.append(decoded)
            encodings |= formats
    finally:
        pool.shutdown(cancel_futures=True)
    if rows == 0:
        raise UserError(f"{place}: holds no rows")
    return Split(np.concatenate(images), np.concatenate(labels), ", ".join(sorted(encodings)))


def _columns(name: str, start: int, batch: Any, wanted: Wanted) -> tuple[list[bytes | None], np.ndarray]:
    """The encoded images (a list of bytes) and the labels int64 (n,) of one record batch."""
    image, label = (_column(name, batch, candidates) for candidates in (IMAGE_COLUMNS, LABEL_COLUMNS))
    if pa.types.is_struct(image.type) and image.type.get_field_index("bytes") >= 0:
        image = image.field("bytes")
    if not (pa.types.is_binary(image.type) or pa.types.is_large_binary(image.type)):
        raise UserError(
            f"{name}: image column is {image.type}; allowed: binary, or struct<bytes: binary, path: string>"
        )
    if not pa.types.is_integer(label.type):
        raise UserError(f"{name}: label column is {label.type}; allowed: integers")
    for row, value in enumerate(label.to_pylist()):
        if value is None or not 0 <= value < wanted.classes:
            raise UserError(
                f"{name} row {start + row}: label {value}; {wanted.name} has labels 0 to {wanted.classes - 1}"
            )
    return image.to_pylist(), label.to_numpy(zero_copy_only=False).astype(np.int64)


def _column(name: str, batch: Any, candidates: tuple[str, ...]) -> Any:
    for candidate in candidates:
        if candidate in batch.schema.names:
            return batch.column(batch.schema.get_field_index(candidate))
    raise UserError(f"{name}: no column named {' or '.join(candidates)}")


def _decode_all(encoded: list[bytes | None], name: str, start: int, wanted: Wanted) -> tuple[np.ndarray, set[str]]:
    channels, height, width = wanted.shape
    mode = {1: "L", 3: "RGB"}[channels]
    images = np.empty((len(encoded), height, width, channels), np.uint8)
    formats = set()
    for row, data in enumerate(encoded):
        where = f"{name} row {start + row}"
        if data is None:
            raise UserError(f"{where}: the image is not inside the file (its bytes are null)")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                size = image.size
                if size == (width, height):  # looked at before any pixel is decoded
                    images[row] = np.asarray(image.convert(mode)).reshape(height, width, channels)
                    formats.add(str(image.format))
        except Exception as error:  # whatever a decoder makes of foreign bytes
            raise UserError(f"{where}: the image cannot be decoded ({line(error)})") from error
        if size != (width, height):
            raise UserError(f"{where}: image of {size[0]}x{size[1]}; all of {wanted.name} are {width}x{height}")
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)), formats


def line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
