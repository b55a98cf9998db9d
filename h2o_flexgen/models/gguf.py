"""GGUF files, llama.cpp's format of a model in one file: its config, its tokenizer, and its tensors under the names of
Hugging Face checkpoints.

The package `gguf` reads the file and dequantises its types.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.files import cache_root, converted
from h2o_flexgen.formats import GGUF, Format
from h2o_flexgen.models.gguf_tokenizer import write_tokenizer
from h2o_flexgen.models.registry import spec_of
from h2o_flexgen.models.rope import frequencies
from h2o_flexgen.models.spec import Layer, Rope

#: architectures that can be read, by GGUF's names, which are their `model_type`; Mistral's is "llama" too
ARCHITECTURES = ("llama", "qwen2", "qwen3")
#: types that stay as they are; all others are dequantised
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: the file of `GGUFFile.table`
TABLE = "tensors.json"
#: elements that are dequantised at once
PART = 1 << 22
#: the RoPE scaling of every LLaMA 3.1 and 3.2 but for its factor
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and not os.path.isdir(path)


def unpacked(path: Path) -> Path:
    """The folder with the config and the tokenizer of a GGUF file, made once and kept under the cache folder.

    Raises:
        UserError: as `GGUFFile`; a tokenizer of a kind that is not known; or no space.
    """
    try:
        return converted([path], "config and tokenizer", lambda folder: GGUFFile(path).unpack(folder))
    except OSError as e:
        raise UserError(f"cannot unpack {path} into {cache_root()}: {e.strerror or e}") from None


def in_place(path: Path, layers: Sequence[Layer]) -> dict[str, tuple[int, tuple[int, ...], Format]]:
    """{name: (offset, shape, format)} of those tensors of a model, by their names in a Hugging Face checkpoint, that
    lie in a GGUF file as they can be streamed.

    Raises:
        UserError: as `GGUFFile`, or a tensor that is missing or has another shape.
    """
    table, found = _table(path), {}
    for name, shape, stored, heads in _named(path, table["config"], layers):
        kind, offset, its_shape = _of_name(table["tensors"], stored, path)
        if kind in GGUF:
            _check_shape(path, stored, tuple(its_shape), shape)
            found[name] = (offset, shape, replace(GGUF[kind], heads=heads))
    return found


def _table(path: Path) -> dict:
    """`GGUFFile.table`, kept under the cache folder if it can be: in the file it comes behind the vocabulary, which
    takes seconds to read."""

    def write(folder: Path) -> None:
        (folder / TABLE).write_text(json.dumps(GGUFFile(path).table()))

    try:
        return json.loads((converted([path], "table of tensors", write) / TABLE).read_text())
    except (OSError, ValueError):
        return GGUFFile(path).table()


def _reader(path: Path) -> type:
    """gguf's reader, on a plain view of the mapped file: slices of a memory map take three times as long. Raises
    UserError if the package is missing."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"reading {path} needs the package gguf: pip install gguf") from None

    class Reader(GGUFReader):
        data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", np.asarray(mapped)))

    return Reader


class GGUFFile:
    """A model in one GGUF file. Methods raise UserError if it lacks what they need.

    Attributes:
        architecture: GGUF's name of it, one of ARCHITECTURES.
        tensors: {GGUF's name: what its reader says of the tensor}.

    Raises:
        UserError: the package `gguf` is missing, or the file cannot be read, is not whole, is a part of a split model,
            or of an architecture that is not known.
    """

    def __init__(self, path: Path):
        self.path, reader_of = path, _reader(path)
        try:
            reader = reader_of(path)
            self.fields, self.tensors = reader.fields, {tensor.name: tensor for tensor in reader.tensors}
            self.architecture, parts = self.field("general.architecture"), int(self.field("split.count", 1))
            if self.architecture is None:
                raise ValueError("it names no architecture")
        except OSError as e:
            raise UserError(f"cannot read {path}: {e.strerror}") from None
        except Exception as e:  # the reader checks nothing: what breaks first depends on the file
            raise UserError(f"{path} is not a whole GGUF file ({reason(e)}); download it again") from None
        if reader.byte_order == "S":
            raise UserError(f"{path} is a big-endian file, which is not supported")
        if parts > 1:
            raise UserError(f"{path} is a part of a split model: join the parts with llama-gguf-split --merge")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UserError(
                f"{path}: no support for GGUF files of the architecture {self.architecture!r}; known: {known}"
            )

    def unpack(self, folder: Path) -> None:
        """Write config.json and the files of the tokenizer, if there is one, into a folder."""
        spec_of(self.config, str(self.path))  # raises for sizes that make no sense
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        write_tokenizer(self, folder)

    def table(self) -> dict:
        """The config, and of each tensor by GGUF's name its type, its offset and its shape."""
        tensors = {name: (t.tensor_type.name, int(t.data_offset), _shape(t)) for name, t in self.tensors.items()}
        return {"config": self.config, "tensors": tensors}

    # metadata

    def field(self, name: str, default=None):
        """A value of the metadata by its whole name, and `default` where there is none."""
        return self.fields[name].contents() if name in self.fields else default

    def _get(self, key: str, default=None):
        """A value of the architecture; without a default it must be there."""
        value = self.field(f"{self.architecture}.{key}", default)
        if value is None:
            raise UserError(f"{self.path} has no value for {self.architecture}.{key}")
        return value

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            raise UserError(f"{self.path}: {self.architecture}.{key} must be a whole number, 1 or more, not {value!r}")
        return value

    @cached_property
    def config(self) -> dict:
        """As the config.json of a checkpoint, read by `models.registry.spec_of`."""
        heads, hidden = self._size("attention.head_count"), self._size("embedding_length")
        head_dim = self._size("attention.key_length", max(1, hidden // heads))
        if self._get("rope.dimension_count", head_dim) != head_dim:
            raise UserError(f"{self.path} rotates a part of each head only, which is not supported in GGUF files")
        config = {
            "model_type": self.architecture,
            "num_hidden_layers": self._size("block_count"),
            "hidden_size": hidden,
            "intermediate_size": self._get("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": int(_of_name(self.tensors, "token_embd.weight", self.path).shape[-1]),
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._get("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "eos_token_id": self._eos(),
        }
        kinds = {tensor.tensor_type.name for tensor in self.tensors.values() if len(tensor.shape) > 1}
        if len(kinds) == 1 and kinds < FLOATS.keys():
            config["dtype"] = str(FLOATS[kinds.pop()]).removeprefix("torch.")
        return config

    def _eos(self) -> list[int]:
        """Tokens that end a text: the end of a text, and that of an answer in a conversation."""
        ids = (self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return [token for token in ids if token is not None]

    def _rope_scaling(self, head_dim: int) -> dict | None:
        if "rope_freqs.weight" in self.tensors:
            return self._llama3_scaling(head_dim)
        kind = self._get("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._get("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._get("rope.scaling.original_context_length")
        return scaling

    def _llama3_scaling(self, head_dim: int) -> dict:
        """The file only has divisors of the frequencies: the slowest has the factor, the others must follow from it."""
        divisors = self.dequantised("rope_freqs.weight", torch.float32)
        scaling = {"factor": float(divisors.max()), **LLAMA3_ROPE}
        theta, positions = self._get("rope.freq_base", 10000.0), self._size("context_length")
        plain, scaled = (
            frequencies(Rope(kind, theta, head_dim, positions, tuple(parameters.items())), positions)[0]
            for kind, parameters in (("default", {}), ("llama3", scaling))
        )
        if divisors.shape != plain.shape or not torch.allclose(plain / scaled, divisors, rtol=1e-3):
            raise UserError(f"{self.path}: the RoPE divisors in rope_freqs.weight are not those of LLaMA 3")
        return {"rope_type": "llama3", **scaling}

    # tensors

    def checkpoint_tensors(self, layers: Sequence[Layer], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all tensors in `layers` by their names in a Hugging Face checkpoint.

        Args:
            dtype: of those that are quantised in the file.
        """
        for name, shape, stored, heads in _named(self.path, self.config, layers):
            tensor = self.dequantised(stored, dtype)
            _check_shape(self.path, stored, tuple(tensor.shape), shape)
            yield name, unpermuted(tensor, heads) if heads else tensor

    def dequantised(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor by its name in the file: floats as they are, others in `dtype`, dequantised a part at a time."""
        import gguf

        found = _of_name(self.tensors, name, self.path)
        shape, kind = _shape(found), found.tensor_type
        if kind.name in FLOATS:
            raw = torch.from_numpy(np.array(found.data).view(np.uint8).reshape(-1))
            return raw.view(FLOATS[kind.name]).view(shape)
        out = torch.empty(shape, dtype=dtype).view(-1, shape[-1])
        data, rows = found.data.reshape(len(out), -1), max(1, PART // shape[-1])
        try:
            for at in range(0, len(out), rows):
                out[at : at + rows] = torch.from_numpy(gguf.dequantize(data[at : at + rows], kind))
        except NotImplementedError:
            raise UserError(f"{self.path}: {name!r} is of the type {kind.name}, which cannot be read") from None
        return out.view(shape)


def _named(path: Path, config: dict, layers: Sequence[Layer]) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """(name in a checkpoint, shape, GGUF's name, heads whose rows llama.cpp has put in its order) of tensors. Raises
    UserError for one that no file of this architecture has."""
    import gguf

    kind = config["model_type"]
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == kind)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for layer in layers:
        for name, shape in layer.shapes.items():
            module, _, part = name.rpartition(".")
            turned, stored = heads.get(module.rpartition(".")[2], 0) if kind == "llama" else 0, names.get_name(module)
            if stored is None:
                raise UserError(f"{path} has no tensor {name!r}: the config is of another model")
            yield name, shape, f"{stored}.{part}", turned


def _of_name(tensors: dict, name: str, path: Path):
    if name not in tensors:
        raise UserError(f"{path} has no tensor {name!r}")
    return tensors[name]


def _check_shape(path: Path, stored: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if found != shape:
        raise UserError(f"{path}: {stored!r} has the shape {list(found)}, its metadata ask for {list(shape)}")


def _shape(tensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def unpermuted(tensor: Tensor, heads: int) -> Tensor:
    """The rows (heads * D, ...) of queries or keys in the order of a checkpoint: llama.cpp lays the two elements that
    RoPE rotates together side by side, where a checkpoint has them half a head apart."""
    pairs = tensor.view(heads, len(tensor) // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
