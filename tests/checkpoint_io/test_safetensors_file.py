"""Headers and byte ranges of safetensors files, against the safetensors library."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from coati_ext.checkpoint_io.checkpoint import read_checkpoint
from coati_ext.checkpoint_io.safetensors_file import DTYPES, make_header, read_exactly, read_header
from coati_ext.checkpoint_io.workers import bytes_of


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}.{i}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for name, dtype in DTYPES.items()
        if dtype is not torch.float8_e8m0fnu
        for i, shape in enumerate([(3, 5), (), (0, 4), (7,)])
    } | {"scale": torch.tensor([0, 1, 127, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu)}


def test_reads_what_the_library_writes(tensors, tmp_path):
    file = tmp_path / "a.safetensors"
    save_file(tensors, file, metadata={"format": "pt", "of": "test"})
    entries, metadata = read_header(file)
    assert metadata == {"format": "pt", "of": "test"}
    assert {e.name: (e.dtype, e.shape) for e in entries} == {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    with file.open("rb") as opened:
        for entry in entries:
            found = torch.empty(entry.shape, dtype=entry.dtype)
            read_exactly(opened.fileno(), bytes_of(found), entry.start, file)
            expected = tensors[entry.name].contiguous().view(-1).view(torch.uint8)
            assert torch.equal(found.view(-1).view(torch.uint8), expected), entry.name


def test_the_library_reads_what_we_write(tensors, tmp_path):
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header, offsets = make_header([(n, t.dtype, t.shape) for n, t in ordered], {"format": "pt"})
    file = tmp_path / "a.safetensors"
    content = bytearray(header)
    for name, tensor in ordered:
        assert offsets[name] == len(content)
        content += bytes_of(tensor.contiguous())
    file.write_bytes(content)
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[n].view(-1).view(torch.uint8), t.contiguous().view(-1).view(torch.uint8))
        for n, t in tensors.items()
    )
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def with_header(content: dict, data: bytes = b"\0" * 8) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", "is no safetensors file"),
        (b"\xff" * 16, "is no safetensors file"),
        (b"\x10" + b"\0" * 7 + b"{}", "cut short within its header"),
        (b"\x02" + b"\0" * 7 + b"[]", "its header is not a mapping"),
        (b"\x02" + b"\0" * 7 + b"\xff\xff", "its header is not JSON"),
        (with_header({"a": ONE}, b"\0" * 7), "a ends at byte"),
        (with_header({"a": ONE}, b"\0" * 9), "1 bytes after its last tensor"),
        (with_header({"a": {**ONE, "dtype": "F4"}}), "a has the unknown dtype 'F4'"),
        (with_header({"a": {**ONE, "shape": [3]}}), "a has 8 bytes, but F32 of shape [3] takes 12"),
        (with_header({"a": {**ONE, "shape": [-2]}}), "entry for a is damaged"),
        (with_header({"a": {**ONE, "data_offsets": [0]}}), "entry for a is damaged"),
        (with_header({"a": 3}), "entry for a is damaged"),
        (with_header({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, b"\0" * 12), "b begins at byte"),
        (with_header({"a": {**ONE, "data_offsets": [8, 16]}}, b"\0" * 16), "a begins at byte"),
        (with_header({"__metadata__": 3, "a": ONE}), "__metadata__"),
    ],
)
def test_damage_is_named(content, expected, tmp_path):
    file = tmp_path / "broken.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.safetensors") as error:
        read_header(file)
    assert expected in str(error.value)


def indexed(folder, weight_map, **files):
    for name, tensors in files.items():
        save_file({n: torch.ones(2) for n in tensors}, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_only_the_index_decides_what_is_read(tmp_path):
    indexed(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=["a"], two=["b"], stray=["a", "c"])
    checkpoint = read_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == {"a", "b"}
    assert sorted(checkpoint.shards) == ["one.safetensors", "two.safetensors"]
    assert checkpoint.nbytes == 16


@pytest.mark.parametrize(
    "weight_map, expected",
    [
        ({"a": "one.safetensors", "c": "one.safetensors"}, "lists, but they are not there: c in one.safetensors"),
        ({"a": "one.safetensors"}, "does not list: b in one.safetensors"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, "two.safetensors is missing"),
        ({"a": "../one.safetensors"}, "expected the name of a .safetensors file"),
        ({"a": 3}, "expected the name of a .safetensors file"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_that_disagrees_is_an_error(weight_map, expected, tmp_path):
    indexed(tmp_path, weight_map, one=["a", "b"])
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        read_checkpoint(tmp_path)
    assert expected in str(error.value)


def test_no_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        read_checkpoint(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="holds neither"):
        read_checkpoint(tmp_path)
