"""Headers of GGUF files that are damaged, hostile or split."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import gguf
import pytest
import torch
import zoo
from gguf import GGMLQuantizationType as Type
from gguf_tools import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen import LLM
from h2o_flexgen.errors import UserError
from h2o_flexgen.models.gguf import GGUFFile, in_place
from h2o_flexgen.models.gguf_file import read_header, read_model
from h2o_flexgen.models.registry import family, spec_of
from h2o_flexgen.models.source import find_model

pytest_plugins = ["command_tools"]

SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
F32 = Type.F32.value
Q8_0 = Type.Q8_0.value


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, dims: tuple[int, ...], type_: int = F32, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", type_, offset)


def value(name: str, kind: int, raw: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + raw


def numbers(kind: int, count: int, raw: bytes = b"") -> bytes:
    """An array."""
    return struct.pack("<IQ", kind, count) + raw


def file_of(path: Path, tensors=(), values=(), counts=None, version=3, data=bytes(256)) -> Path:
    tensor_count, value_count = counts or (len(tensors), len(values))
    header = b"GGUF" + struct.pack("<IQQ", version, tensor_count, value_count) + b"".join((*values, *tensors))
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def test_a_header_is_read_as_by_the_package_gguf(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", zoo.build("llama", tmp_path / "checkpoint", **SIZES), Type.Q4_0)
    reader = gguf.GGUFReader(path)
    found = read_header(path)
    assert {t.name: (int(t.data_offset), int(t.n_bytes)) for t in reader.tensors} == {
        name: (t.offset, t.nbytes) for name, t in found.tensors.items()
    }
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.fields == expected


def test_values_of_each_type(tmp_path):
    values = [
        value("a", 0, b"\xff"),
        value("b", 5, struct.pack("<i", -2)),
        value("c", 7, b"\x01"),
        value("d", 12, struct.pack("<d", 0.1)),
        value("e", 8, text("é")),
        value("f", 9, numbers(8, 2, text("x") + text(""))),
        value("g", 9, numbers(10, 2, struct.pack("<2Q", 1, 1 << 60))),
        value("h", 9, numbers(7, 2, b"\x00\x01")),
    ]
    header = read_header(file_of(tmp_path / "x.gguf", values=values))
    found = {name: header.value(name) for name in header.fields}
    assert found == dict(a=255, b=-2, c=True, d=0.1, e="é", f=["x", ""], g=[1, 1 << 60], h=[False, True])
    assert header.value("i", 7) == 7


@pytest.mark.parametrize(
    "message, content",
    [
        ("'a' begins at 32, not at 64 after", dict(tensors=[tensor("a", (8,), offset=32), tensor("b", (16,))])),
        ("'b' begins at 0, not at 32 after", dict(tensors=[tensor("a", (8,)), tensor("b", (8,))])),
        ("'b' begins at 64, not at 32 after", dict(tensors=[tensor("a", (8,)), tensor("b", (8,), offset=64)])),
        ("'a' begins at 4, not at 0", dict(tensors=[tensor("a", (8,), offset=4)])),
        ("'a' begins at 18446744073709551584, not at 0", dict(tensors=[tensor("a", (8,), offset=(1 << 64) - 32)])),
        ("'a' goes beyond the end of the file", dict(tensors=[tensor("a", (65,))])),
        ("'a' goes beyond the end", dict(tensors=[tensor("a", (1 << 32, 1 << 32))])),
        ("'a' cannot have the shape \\[0\\]", dict(tensors=[tensor("a", (0,))])),
        ("'a' cannot have the shape \\[2, 33\\]", dict(tensors=[tensor("a", (33, 2), Q8_0)])),
        ("'a' has 5 dimensions", dict(tensors=[tensor("a", (1,) * 5)])),
        ("'a' has 4294967295 dimensions", dict(tensors=[text("a") + b"\xff" * 4])),
        ("it has two tensors 'a'", dict(tensors=[tensor("a", (8,)), tensor("a", (8,), offset=32)])),
        ("'a' is of the type 999, which the package gguf does not know", dict(tensors=[tensor("a", (8,), 999)])),
        ("it has two values of 'k'", dict(values=[value("k", 0, b"0")] * 2)),
        ("unknown type 13", dict(values=[value("k", 13, b"")])),
        ("alignment must be a power of two, not 0", dict(values=[value("general.alignment", 4, bytes(4))])),
        ("alignment must be a power of two, not 'x'", dict(values=[value("general.alignment", 8, text("x"))])),
        ("it has two tensors ''", dict(counts=(1 << 60, 0))),
        ("its header ends too early", dict(counts=(1 << 60, 0), data=b"")),
        ("it has two values of ''", dict(counts=(0, 1 << 60))),
        ("its header ends too early", dict(values=[value("k", 9, numbers(0, 1 << 60))])),
        ("its header ends too early", dict(values=[value("k", 9, numbers(8, 1 << 60))])),
        ("its header ends too early", dict(values=[value("k", 8, struct.pack("<Q", 1 << 63))])),
        ("an array of the type 9", dict(values=[value("k", 9, numbers(9, 1 << 20, numbers(9, 1 << 20)))])),
        ("x.gguf is in version 1 of GGUF", dict(version=1)),
        ("^[^(]*x.gguf is a big-endian file", dict(version=3 << 24)),
    ],
)
def test_an_invalid_header(tmp_path, message, content):
    path = file_of(tmp_path / "x.gguf", **content)
    with pytest.raises(UserError, match=message) as error:
        read_model(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> zoo.Tiny:
    """A model whose matrices are in blocks."""
    folder = tmp_path_factory.mktemp("whole")
    tiny = zoo.build("llama", folder / "checkpoint", **SIZES)
    return zoo.Tiny("llama", tiny.hf, write_gguf(folder / "model.gguf", tiny, Type.Q8_0))


def contents(path: Path) -> dict[str, torch.Tensor]:
    """Everything that a job would read."""
    file = GGUFFile(path)
    layers = family(file.architecture).tensors(spec_of(file.config))
    in_place(path, layers)
    return dict(file.checkpoint_tensors(layers, torch.float32))


@pytest.fixture(scope="module")
def damaged(whole, tmp_path_factory):
    """A function that damages a byte of the header and returns the file's path."""
    path = shutil.copy(whole.folder, tmp_path_factory.mktemp("damaged") / "model.gguf")
    good = Path(path).read_bytes()
    length = min(t.offset for t in read_header(whole.folder).tensors.values())

    def damage(at: int, flip: int) -> Path:
        with open(path, "r+b") as file:
            file.write(good[:length])
            file.seek(at % length)
            file.write(bytes([good[at % length] ^ flip]))
        return Path(path)

    return damage


@pytest.fixture(scope="module")
def expected(whole) -> dict[str, torch.Tensor]:
    return contents(whole.folder)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 1 << 16), flip=st.integers(1, 255))
def test_a_damaged_byte_gives_the_same_tensors_or_an_error(expected, damaged, at, flip):
    try:
        found = contents(damaged(at, flip))
    except UserError:
        return
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


# models in several files


def split(tiny: zoo.Tiny, folder: Path, count: int = 3) -> list[Path]:
    """A model split as by llama.cpp: the first part has the metadata, here without tensors."""
    folder.mkdir()
    reader = gguf.GGUFReader(tiny.folder)
    files = [folder / f"model-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    for number, file in enumerate(files):
        writer = gguf.GGUFWriter(file, "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for t in reader.tensors[number - 1 :: count - 1] if number else ():
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


def tokens(model: Path) -> list:
    with LLM(str(model), device="cpu", dtype="float32", progress=False) as llm:
        return [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7], [9]])]


def test_a_split_model_is_found_by_any_of_its_names(whole, tmp_path):
    files = split(whole, tmp_path / "split")
    names = [str(name) for name in (*files, files[0].parent)]
    assert [find_model(name)[0] for name in names] == [files[0]] * 4
    assert tokens(files[2]) == tokens(whole.folder)


def test_a_missing_part(whole, tmp_path, refused):
    files = split(whole, tmp_path / "split")
    files[1].unlink()
    expected = "belongs to a model in 3 parts, and model-00002-of-00003.gguf is missing"
    assert expected in refused("--model", files[0]) and expected in refused("--model", files[0].parent)
    files[0].unlink()
    assert "in 3 parts, and 2 are missing, as model-00001-of-00003.gguf" in refused("--model", files[2])


def test_parts_of_different_models(whole, tmp_path):
    files = split(whole, tmp_path / "split")
    shutil.copy(files[1], files[2])
    with pytest.raises(UserError, match="model-00003-of-00003.gguf claims to be part 1 of 3"):
        find_model(str(files[0]))
    renamed = shutil.copy(files[1], tmp_path / "other.gguf")
    with pytest.raises(UserError, match="other.gguf claims to be part 1 of 3"):
        GGUFFile(Path(renamed))
    values = [value("split.no", 9, numbers(4, 2, struct.pack("<2I", 0, 1)))]
    with pytest.raises(UserError, match=r"part \[0, 1\] of 1"):
        read_model(file_of(tmp_path / "list.gguf", values=values))


def test_an_unknown_tensor(whole, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole.folder.read_bytes().replace(b"output.weight", b"output.weighs", 1))
    with pytest.raises(UserError, match="has a tensor 'output.weighs', which is unknown in llama models"):
        contents(path)
