"""Small hostile files: the commands answer with a line, in time and memory that fit the file."""

import io
import json
import struct
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
import zstandard

from qupel.data import sources
from qupel.deploy import About, FormatError, save
from qupel.deploy.file import dumps, loads, pack_model
from qupel.tasks import zoo as models
from qupel.util.errors import UserError
from test_deploy_commands import call
from test_deploy_file import deployed


def framed(head: str) -> bytes:
    return struct.pack("<Q", len(head)) + head.encode()


def small(**about):
    """A packed MLP, and what it says about itself."""
    torch.manual_seed(0)
    module, codebook = deployed(models.mlp(6, classes=3), {"3.weight": 2})
    return dumps(pack_model(module, codebook, About("mlp", (1, 2, 3), 3, **about)))


# --- packed files ---


def test_naming_a_key_that_comes_twice_is_linear(tmp_path):
    """869 kB of keys, the last one twice, took 295 s."""
    keys = [f'"{k:x}":0' for k in range(90_000)]
    (tmp_path / "m").write_text("{" + ",".join([*keys, keys[-1]]) + "}")
    assert 800_000 < (tmp_path / "m").stat().st_size < 1 << 20
    code = "import resource, sys; from pathlib import Path; from qupel.deploy import header\n"
    code += "resource.setrlimit(resource.RLIMIT_CPU, (20, 20))\n"  # seconds
    code += "header.parse(Path(sys.argv[1]).read_bytes(), 'it')"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "m"], capture_output=True, text=True)
    assert "FormatError: it: the name '15f8f' comes twice" in done.stderr, done.returncode


def test_a_head_beyond_a_mebibyte_is_not_parsed():
    size = (1 << 20) + 1
    with pytest.raises(FormatError, match=r"its head has 1,048,577 bytes; allowed are 1,048,576"):
        loads(struct.pack("<Q", size) + b"{" * size)
    with pytest.raises(UserError, match="names and descriptions"):
        small(extra={"x": "x" * (1 << 20)})


def test_long_strings_are_cut_when_they_are_shown(tmp_path):
    """Labels, a client and extras of hundreds of kilobytes: `inspect` and errors say the beginning."""
    long = "y" * 200_000
    (tmp_path / "m.safetensors").write_bytes(small(client=long, extra={"accuracy": 0.5, "note": long, "more": [long]}))
    said = call("inspect", tmp_path / "m.safetensors")
    assert len(said) < 4_000
    assert "accuracy 0.5" in said
    head = json.dumps({"n" * 300_000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    with pytest.raises(FormatError, match="a name of 300000 characters") as refused:
        loads(framed(head) + b"1234")
    assert len(str(refused.value)) < 200


def test_thousands_of_layers_are_counted_not_listed(tmp_path):
    count = 5_000
    table, layers = {}, {}
    for k in range(count):
        layers[f"{k}"] = [1]
        table[f"{k}_codebook"] = {"dtype": "F32", "shape": [1], "data_offsets": [4 * k, 4 * k + 4]}
        table[f"{k}_packed"] = {"dtype": "U8", "shape": [1], "data_offsets": [4 * count + k, 4 * count + k + 1]}
    described = {"version": 1, "layers": layers, "rest": {}, "about": {}}
    head = json.dumps(table | {"__metadata__": {"qupel": json.dumps(described)}}, separators=(",", ":"))
    (tmp_path / "m.safetensors").write_bytes(framed(head) + bytes(5 * count))
    said = call("inspect", tmp_path / "m.safetensors")
    assert "and 4,800 more" in said
    assert said.count("\n") < 450


def test_a_budget_that_no_float_holds(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(small(extra={"budget": 10**4000}))
    assert "m.safetensors" in call("export", tmp_path / "m.safetensors", "--out", tmp_path / "o")


def test_a_zstd_frame_unfolds_to_what_its_head_tells():
    """16 MB of zeros behind a head that tells of a few bytes: refused before they are unfolded."""
    content = small()
    bomb = zstandard.ZstdCompressor().compress(content + bytes((16 << 20) - len(content)))
    tracemalloc.start()
    with pytest.raises(FormatError, match="the tensors take"):
        loads(bomb)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert loads(zstandard.ZstdCompressor().compress(content)).names == loads(content).names


def test_a_model_file_does_not_choose_the_data_that_is_opened(tmp_path):
    rows = np.zeros((4, 6), np.float32), np.zeros(4, np.int64)
    np.savez(tmp_path / "secret.npz", x_train=rows[0], y_train=rows[1], x_test=rows[0], y_test=rows[1])
    module, codebook = deployed(models.mlp(6, classes=3), 2)
    about = About("mlp", (6,), 3, extra={"data": str(tmp_path / "secret.npz")})
    save(tmp_path / "m.safetensors", module, codebook, about=about)
    assert "names none of the known data sets; give --data" in call("eval", tmp_path / "m.safetensors", code=2)
    assert "of 4 test samples" in call("eval", tmp_path / "m.safetensors", "--data", tmp_path / "secret.npz")


# --- .npz ---


def npy(shape, content, dtype="<f4"):
    """An .npy file with any header."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + content


def archive(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


SOUND = {"x_train": npy((2, 6), bytes(48)), "x_test": npy((2, 6), bytes(48))}
SOUND |= {name: npy((2,), bytes(16), "<i8") for name in ("y_train", "y_test")}


def test_npz_sizes_are_checked_before_anything_is_read(tmp_path):
    assert len(sources.from_npz(archive(tmp_path / "ok.npz", **SOUND)).train) == 2
    absurd = archive(tmp_path / "absurd.npz", **SOUND | {"x_train": npy((10**12, 6), bytes(48))})
    with pytest.raises(UserError, match="not what its header tells"):
        sources.from_npz(absurd)
    negative = archive(tmp_path / "negative.npz", **SOUND | {"x_train": npy((-2, -6), bytes(48))})
    with pytest.raises(UserError, match="not what its header tells"):
        sources.from_npz(negative)
    objects = archive(tmp_path / "objects.npz", **SOUND | {"x_train": npy((6,), bytes(48), "|O")})
    with pytest.raises(UserError, match="unpickled"):
        sources.from_npz(objects)


def test_members_that_are_not_needed_are_not_read(tmp_path):
    """A broken or huge member beside those that are wanted does no harm."""
    found = sources.from_npz(archive(tmp_path / "a.npz", **SOUND | {"other": npy((6,), b"", "|O"), "broken": b"x"}))
    assert len(found.test) == 2


def test_an_npz_bomb_is_refused_before_it_unfolds(tmp_path):
    """150 kB that unfold to 140 MB, four times that as float32."""
    path = archive(tmp_path / "bomb.npz", inputs=npy((140_000_000,), bytes(140_000_000), "|u1"))
    assert path.stat().st_size < 1 << 20
    (tmp_path / "m.safetensors").write_bytes(small())
    assert "unfold to 560,000,000" in call("predict", tmp_path / "m.safetensors", path, code=2)
