"""The packed container: exact round trips, the layout that docs/format.md promises, hostile files."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qupel.core.codebook import Codebook, start_codebook
from qupel.core.layout import Layout
from qupel.deploy import About, FormatError, load, save
from qupel.deploy.file import dumps, loads, pack_model, write_file
from qupel.deploy.pack import bits_for, chunks, decode, pack, packed_size, padding_is_zero, unpack
from qupel.tasks import zoo as models
from qupel.util.errors import UserError


def deployed(module, levels, how="quantile"):
    """The module with its layers (name -> m) hard-quantized in place, and the codebook."""
    layout = Layout.of(module)
    x = layout.flatten(module)
    if isinstance(levels, int):
        levels = dict.fromkeys(layout.default_layers(), levels)
    codebook = start_codebook(layout, x, levels, how)
    layout.load(module, codebook.hard(x))
    return module.eval(), codebook


def resnet(levels=4):
    torch.manual_seed(0)
    module = models.resnet20()
    for name, value in module.state_dict().items():  # as after training: zstd must not live on ones and zeros
        if "bn" in name and "num_batches" not in name:
            value.uniform_(0.5, 1.5)
    return deployed(module, levels)


def same(a, b):
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


# --- bits ---


@given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=70))
def test_unpack_undoes_pack(bits, values):
    codes = np.array([v % 2**bits for v in values], np.uint8)
    packed = pack(codes, bits)
    assert len(packed) == packed_size(len(codes), bits)
    np.testing.assert_array_equal(unpack(packed, len(codes), bits), codes)
    assert padding_is_zero(packed, len(codes), bits)


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (1, [1, 0, 0, 0, 0, 0, 0, 1, 1], [0b10000001, 0b1]),
        (2, [3, 0, 1, 2], [0b10_01_00_11]),
        (3, [0b101, 0b011, 0b110], [0b10_011_101, 0b1]),  # the third code straddles two bytes
        (5, [0b10001, 0b01110], [0b110_10001, 0b01]),
        (8, [7, 255], [7, 255]),
    ],
)
def test_least_significant_bit_first(bits, codes, expected):
    assert pack(np.array(codes, np.uint8), bits).tolist() == expected


@given(st.integers(1, 256), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_decode_is_centers_of_codes(m, n, seed):
    rng = np.random.default_rng(seed)
    centers = np.sort(rng.normal(size=m)).astype(np.float32)
    codes = rng.integers(0, m, n).astype(np.uint8)
    np.testing.assert_array_equal(decode(pack(codes, bits_for(m)), n, centers), centers[codes])


@pytest.mark.parametrize("bits", range(1, 9))
def test_chunks_are_the_codes(bits, monkeypatch):
    monkeypatch.setattr("qupel.deploy.pack._CHUNK", 16)
    codes = np.random.default_rng(0).integers(0, 2**bits, 53).astype(np.uint8)
    np.testing.assert_array_equal(np.concatenate(list(chunks(pack(codes, bits), 53, bits))), codes)


# --- round trips ---


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(["1", "3", "5"]), st.integers(1, 256)), st.integers(0, 2**31), st.booleans())
def test_mixed_levels_come_back_bit_for_bit(levels, seed, compress):
    torch.manual_seed(seed)
    module, codebook = deployed(models.mlp(9, (11, 7), 3), {f"{k}.weight": m for k, m in levels.items()})
    content = dumps(pack_model(module, codebook))
    if compress:
        from qupel.deploy import zstd

        content = zstd.compress(content)
    packed = loads(content)
    other = models.mlp(9, (11, 7), 3)
    packed.into(other)
    assert same(module, other)
    assert packed.names == tuple(f"{k}.weight" for k in levels)
    back = packed.codebook(Layout.of(other))
    assert back.slots == codebook.slots
    assert all(torch.equal(a, b) for a, b in zip(back.centers, codebook.centers, strict=True))


@pytest.mark.parametrize("compress", [False, True])
def test_file_with_batchnorm(tmp_path, compress):
    module, codebook = resnet()
    labels = ("a", "b", "ü", "d", "e", "f", "g", "h", "i", "j")
    about = About("resnet20", (3, 32, 32), 10, labels, (0.5,) * 3, (0.2,) * 3, "client 7", {"accuracy": 0.75})
    path = tmp_path / "new" / "client.safetensors"
    size = save(path, module, codebook, about=about, compress=compress)
    assert size == path.stat().st_size
    packed = load(path)
    assert packed.about == about
    model = packed.model()
    assert not model.training
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), module(x))
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file stays


def test_empty_codebook_is_full_precision(tmp_path):
    module = models.digits_cnn()
    save(tmp_path / "f", module, Codebook())
    other = models.digits_cnn()
    load(tmp_path / "f").into(other)
    assert same(module, other)


def test_rest_as_fp16(tmp_path):
    module, codebook = resnet()
    full = save(tmp_path / "32", module, codebook)
    half = save(tmp_path / "16", module, codebook, rest="fp16")
    rest = sum(value.size for value in pack_model(module, codebook).rest.values())
    assert 2 * rest <= full - half < 2 * rest + 200  # a little more: smaller offsets have fewer digits
    other = models.resnet20()
    load(tmp_path / "16").into(other)
    for (name, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a if "blocks" in name and "conv" in name else a.half().to(a.dtype), b), name
    module.fc.bias.data[0] = 1e6
    with pytest.raises(UserError, match=r"fc\.bias.*65,504"):
        save(tmp_path / "16", module, codebook, rest="fp16")


def test_other_buffers_and_shared_weights(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.two = nn.Linear(3, 3)
            self.two.weight = self.one.weight
            self.register_buffer("count", torch.tensor(5))
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("none", torch.zeros(0, 4))
            self.register_buffer("scratch", torch.randn(3), persistent=False)

    module, codebook = deployed(Odd(), {"one.weight": 3})
    save(tmp_path / "f", module, codebook)
    other = Odd()
    other.count.zero_()
    load(tmp_path / "f").into(other)
    assert same(module, other)
    bad = Odd()
    bad.register_buffer("brain", torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(UserError, match=r"brain.*bfloat16"):
        save(tmp_path / "f", bad, Codebook())


def test_any_safetensors_reader_sees_the_same(tmp_path):
    from safetensors import safe_open

    module, codebook = deployed(models.digits_cnn(), 3)
    save(tmp_path / "f", module, codebook, about=About("digits_cnn"))
    with safe_open(tmp_path / "f", "numpy") as file:
        described = json.loads(file.metadata()["qupel"])
        assert described["version"] == 1
        for layer in load(tmp_path / "f").layers:
            np.testing.assert_array_equal(file.get_tensor(f"{layer.name}_packed"), layer.packed)
            np.testing.assert_array_equal(file.get_tensor(f"{layer.name}_codebook"), layer.centers)
        start = 0
        flat = file.get_tensor("rest.F32")
        for name, shape in described["rest"]["F32"].items():
            size = int(np.prod(shape))
            np.testing.assert_array_equal(flat[start : start + size].reshape(shape), module.state_dict()[name])
            start += size


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_size_against_the_floor(bits, tmp_path):
    """floor = bits x quantized weights / 8 + fp32 rest (with BatchNorm's statistics) + centers."""
    labels = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean, std = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
    extra = {"method": "qupel", "seed": 0, "accuracy": 0.6123}
    for name, bar in [("cnn5", 1.03), ("resnet20", 1.15)]:
        module, codebook = resnet(2**bits) if name == "resnet20" else deployed(models.cnn5(), 2**bits)
        about = About(name, (3, 32, 32), 10, labels, mean, std, "client-007", extra)
        size = save(tmp_path / "f", module, codebook, about=about)
        weights = sum(slot.size for slot in codebook.slots)
        everything = sum(t.numel() for n, t in module.state_dict().items() if "num_batches" not in n)
        floor = weights * bits / 8 + 4 * (everything - weights) + 4 * sum(len(c) for c in codebook.centers)
        assert load(tmp_path / "f").floor == floor
        assert size <= bar * floor
        assert save(tmp_path / "z", module, codebook, about=about, compress=True) <= 1.03 * floor


# --- what is refused when writing ---


def test_refuses_models_that_are_not_on_their_centers(tmp_path):
    module, codebook = deployed(models.digits_cnn(), 4)
    first = codebook.slots[0]
    dict(module.named_parameters())[first.name].data.view(-1)[0] += 1e-6
    with pytest.raises(UserError, match=rf"{first.name}: 1 of {first.size} weights are not on its centers"):
        save(tmp_path / "f", module, codebook)
    for bad in ([0.0, float("nan")], [1.0, 0.0], [0.0] * 257, []):
        with pytest.raises(UserError, match="centers"):
            save(tmp_path / "f", module, Codebook(codebook.slots[:1], (torch.tensor(bad),)))
    with pytest.raises(UserError, match="JSON"):
        save(tmp_path / "f", module, Codebook(), about=About(extra={"accuracy": float("nan")}))
    assert not list(tmp_path.iterdir())


def test_into_refuses_another_model(tmp_path):
    module, codebook = deployed(models.digits_cnn(), 4)
    packed = pack_model(module, codebook)
    with pytest.raises(FormatError, match="does not have"):
        packed.into(nn.Sequential(*models.digits_cnn()[:-1]))
    with pytest.raises(FormatError, match="does not hold"):
        packed.into(nn.Sequential(*models.digits_cnn(), nn.Linear(10, 10)))
    with pytest.raises(FormatError, match=r"weight: F32 \[10, \d+\] in the file, F32 \[9, \d+\] in the model"):
        packed.into(models.digits_cnn(classes=9))
    with pytest.raises(UserError, match="names no model"):
        packed.model()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_file(path, b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match="No space left"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


# --- hostile files ---


def parts(levels=3):
    torch.manual_seed(0)
    module, codebook = deployed(models.mlp(4, (5, 3), 2), {"1.weight": levels, "3.weight": 2})
    content = dumps(pack_model(module, codebook, About("mlp", (4,), 2)))
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def rebuilt(head, data, described=None):
    if described is not None:
        head = head | {"__metadata__": {"qupel": json.dumps(described)}}
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_rebuilt_is_faithful():
    head, data = parts()
    assert loads(rebuilt(head, data)).names == ("1.weight", "3.weight")


def breakages():
    head, data = parts()
    described = json.loads(head["__metadata__"]["qupel"])
    text = json.dumps(head)

    def entry(name, **change):
        return rebuilt(head | {name: head[name] | change}, data)

    def told(**change):
        return rebuilt(head, data, described | change)

    def about(**change):
        return told(about=described["about"] | change)

    centers = head["1.weight_codebook"]["data_offsets"]
    codes = head["1.weight_packed"]["data_offsets"]

    def bytes_at(place, new):
        return rebuilt(head, data[: place[0]] + new + data[place[0] + len(new) :])

    f = struct.pack
    yield "too short", b""
    yield "too short", b"1234567"
    yield "cut short", f("<Q", 2**63) + b"{}"
    yield "cut short", f("<Q", 10**9) + b"{}"
    yield "cut short", f("<Q", 0) + b"{}"
    yield "not JSON", rebuilt(b"{ ", data)
    yield "not JSON", rebuilt(b"\xff\xfe\xfd\xfc", data)
    yield "not JSON", rebuilt(b"[" * 100_000, data)
    yield "not JSON", rebuilt(b'{"a":' + b"9" * 10_000 + b"}", data)
    yield "NaN", rebuilt(b'{"a":NaN}', data)
    yield "not an object", rebuilt(b"[]", data)
    yield "printed", rebuilt(b'{"\\u001b[2J":{}}', data)
    yield "printed", rebuilt(b'{"\\ud800":{}}', data)
    yield "comes twice", rebuilt((text[:-1] + ', "rest.F32": {}}').encode(), data)
    yield "strings", rebuilt(head | {"__metadata__": {"qupel": 1}}, data)
    yield "strings", rebuilt(head | {"__metadata__": []}, data)
    yield "not a packed model", rebuilt(head | {"__metadata__": {}}, data)
    yield "nothing else", rebuilt(head | {"x": 1}, data)
    yield "nothing else", entry("rest.F32", more=1)
    yield "unknown dtype", entry("rest.F32", dtype="F8")
    yield "unknown dtype", entry("rest.F32", dtype=["F32"])
    yield "two whole numbers", entry("rest.F32", data_offsets=[0, 1.0])
    yield "two whole numbers", entry("rest.F32", data_offsets=[-4, 0])
    yield "two whole numbers", entry("rest.F32", data_offsets=[False, True])
    yield "lies at bytes", entry("rest.F32", data_offsets=[4, head["rest.F32"]["data_offsets"][1]])
    yield "lies at bytes", entry("3.weight_codebook", data_offsets=centers)
    yield "lies at bytes", entry("rest.F32", shape=[2**40])
    yield "absurd", entry("rest.F32", shape=[2**31] * 8)
    yield "absurd", entry("rest.F32", shape=[0, 10**30])
    yield "whole numbers", entry("rest.F32", shape=[1] * 9)
    yield "whole numbers", entry("rest.F32", shape=[True])
    yield "whole numbers", entry("rest.F32", shape=[-1])
    yield "whole numbers", entry("rest.F32", shape="12")
    yield "the file holds", rebuilt(head, data[:-1])
    yield "the file holds", rebuilt(head, data + b"\0")
    yield "no version", rebuilt(head, data, [])
    yield "format version 3", told(version=3)
    yield "no tensor 1.weight_scales", told(version=2)
    yield "format version True", told(version=True)
    yield "format version '1'", told(version="1")
    yield "nothing else", told(more=1)
    yield "must be an object", told(layers=[])
    yield "must be an object", told(rest=None)
    yield "must be an object", told(rest={"F32": []})
    yield "no tensor nowhere_codebook", told(layers=described["layers"] | {"nowhere": [1]})
    yield "belongs to no layer", told(layers={"1.weight": [5, 4]})
    yield "need", told(layers=described["layers"] | {"1.weight": [5, 5]})
    yield "need", told(layers=described["layers"] | {"1.weight": [0, 5]})
    yield "need", told(layers=described["layers"] | {"1.weight": [2**40]})
    yield "unknown dtype", told(rest={"F8": {}})
    yield "no tensor rest.I64", told(rest=described["rest"] | {"I64": {}})
    yield "not those of the shapes", told(rest={"F32": described["rest"]["F32"] | {"more": [1]}})
    yield "comes twice", told(rest={"F32": described["rest"]["F32"] | {"1.weight": [0]}})
    yield "finite and sorted", bytes_at(centers, f("<f", float("nan")))
    yield "finite and sorted", bytes_at(centers, f("<f", float("-inf")))
    yield "finite and sorted", bytes_at(centers, f("<f", 1e9))
    yield "code 3, but there are only 3", bytes_at(codes, b"\xff")
    last = head["3.weight_packed"]["data_offsets"][1] - 1
    yield "after the last code", bytes_at([last], b"\xff")
    yield "known fields", about(more=1)
    yield "known fields", told(about=None)
    yield "printed", about(client="\x1b]0;title\x07")
    yield "must be a list", about(labels="ab")
    yield "2 classes", about(labels=["a"])
    yield "printed", about(labels=["a", 1])
    yield "whole number", about(classes=-1)
    yield "finite", about(mean=["1"], std=[1])
    yield "finite", about(mean=[10**400], std=[1])
    yield "std greater than 0", about(mean=[0], std=[0])
    yield "one number per channel", about(mean=[0, 0], std=[1, 1])
    yield "must be an object", about(extra=[])
    yield "broken zstd", b"\x28\xb5\x2f\xfd"
    yield "broken zstd", b"\x28\xb5\x2f\xfd\x20\x64" + b"\0" * 9


BROKEN = list(breakages())


@pytest.mark.parametrize("case", range(len(BROKEN)), ids=[f"{i}-{message}" for i, (message, _) in enumerate(BROKEN)])
def test_hostile_files_are_refused(case):
    message, content = BROKEN[case]
    with pytest.raises(FormatError, match=message):
        loads(content)


def test_refusals_name_the_file(tmp_path):
    (tmp_path / "f").write_bytes(b"1234")
    with pytest.raises(FormatError, match="f: 4 bytes: too short"):
        load(tmp_path / "f")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "g")


def test_zstd_bombs_are_refused():
    import zstandard

    with pytest.raises(FormatError, match="unfolds to 33554432"):
        loads(zstandard.ZstdCompressor().compress(bytes(1 << 25)))
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(b"1234")
    with pytest.raises(FormatError, match="does not state its size"):
        loads(stream)
    head, data = parts()
    with pytest.raises(FormatError, match="broken zstd"):
        loads(zstandard.ZstdCompressor().compress(rebuilt(head, data)) + b"more")


def test_a_named_model_is_checked_before_it_is_built():
    """A file that claims inputs of 10^7 numbers must not make an MLP for them."""
    head, data = parts()
    described = json.loads(head["__metadata__"]["qupel"])
    huge = described["about"] | {"input_shape": [1000, 1000, 10]}
    packed = loads(rebuilt(head, data, described | {"about": huge}))
    with pytest.raises(FormatError, match="in the file"):
        packed.model()
