"""GGUF files, llama.cpp's format for a model in one file: config, tokenizer, and tensors by the names of Hugging Face
checkpoints. Names and dequantisation come from the package `gguf`.
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

from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import GGUF, Format, dtype_name
from h2o_flexgen.formats.forms import experts_of
from h2o_flexgen.formats.matrix import stored_rows
from h2o_flexgen.models.gguf_file import GGUFTensor, parts, read_model
from h2o_flexgen.models.gguf_tokenizer import write_tokenizer
from h2o_flexgen.models.llama import LLAMA3_ROPE
from h2o_flexgen.models.registry import spec_of
from h2o_flexgen.models.rope import ORIGINAL, frequencies
from h2o_flexgen.models.spec import FULL, SLIDING, Config, Layer, Rope, shortened
from h2o_flexgen.utils.copies import converted
from h2o_flexgen.utils.files import OTHER_HOME, cache_root

#: supported architectures, by GGUF's names -> `model_type`; Mistral's is "llama" too
ARCHITECTURES = {name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "phi3")}
ARCHITECTURES |= {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "gpt-oss": "gpt_oss"}
ARCHITECTURES |= {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
#: architectures with Gemma's norms -> layers of the model that alone scales attention by hidden width / heads
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
#: architectures that were trained in bfloat16: their hidden states exceed what float16 holds
IN_BFLOAT16 = (*LARGEST_GEMMAS, "gemma4", "gpt-oss")
#: ends of tensors' names -> those by which the package `gguf` knows their modules
RENAMED = {"router.scale": "router.proj.scale", "router.per_expert_scale": "experts.down_proj.scale"}
#: in `rope_freqs.weight` what is less divides a frequency; else the pair stays as it is
UNROTATED = 1e29
#: types that are read unchanged; all others are dequantised
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: suffixes of tensors that are not weights
UNUSED = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight", "attn_rot_embd.weight")
#: elements that are dequantised at a time
PART = 1 << 22


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and not os.path.isdir(path)


def unpacked(path: Path) -> Path:
    """The folder with the config and the tokenizer of a GGUF file, made once and kept in the cache folder. Raises
    UserError as `GGUFFile`, for an unsupported tokenizer, or for lack of space."""
    try:
        return converted(parts(path), "config and tokenizer", lambda folder: GGUFFile(path).unpack(folder), "unpacked")
    except OSError as e:
        raise UserError(f"cannot unpack {path} into {cache_root()}: {e.strerror or e}; {OTHER_HOME}") from None


def in_place(path: Path, layers: Sequence[Layer]) -> dict[str, tuple[Path, int, tuple[int, ...], Format]]:
    """{name in a Hugging Face checkpoint: (file, offset, shape, format)} of the tensors that can be streamed in their
    stored format from a GGUF file or its parts. `layers`: all layers of the model. Raises UserError as `GGUFFile`, or
    for a tensor that is missing, has another shape, or belongs to another architecture."""
    file = GGUFFile(path)
    found = {}
    unknown = {name for name in file.tensors if not name.endswith(UNUSED)}
    for name, stored, tensor, heads in file.named(layers):
        unknown.discard(stored)
        if tensor.type in GGUF:
            found[name] = (tensor.path, tensor.offset, tensor.shape, replace(GGUF[tensor.type], heads=heads))
    if unknown:
        name = shortened(min(unknown))
        raise UserError(f"{path} has a tensor {name}, which is unknown in {file.architecture} models")
    return found


class GGUFFile:
    """A model in a GGUF file or in several parts; `path` is any of them. Methods raise UserError for missing data.

    Attributes:
        architecture: one of ARCHITECTURES.
        tensors: by GGUF's names.

    Raises:
        UserError: the package `gguf` is missing, a file cannot be read or is damaged, or an unsupported architecture.
    """

    def __init__(self, path: Path):
        self.path = path
        self.header = read_model(path)
        self.tensors = self.header.tensors
        self.architecture = self.field("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UserError(
                f"{path}: no support for GGUF files of the architecture {shortened(self.architecture)}; known: {known}"
            )

    def unpack(self, folder: Path) -> None:
        """Write config.json and, if there is a tokenizer, its files into a folder."""
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        write_tokenizer(self, folder)

    # metadata

    def field(self, name: str, default=None):
        """A value of the metadata by its full name, or `default`."""
        return self.header.value(name, default)

    def _get(self, key: str, default=None):
        """A value of the architecture, which is required unless there is a default."""
        value = self.field(f"{self.architecture}.{key}", default)
        if value is None:
            raise UserError(f"{self.path} has no value for {self.architecture}.{key}")
        return value

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            what = f"{self.architecture}.{key} must be a whole number, 1 or more, not {shortened(value)}"
            raise UserError(f"{self.path}: {what}")
        return value

    @cached_property
    def config(self) -> dict:
        """The config.json of an equivalent checkpoint, checked by `registry.spec_of`."""
        heads = self._size("attention.head_count")
        hidden = self._size("embedding_length")
        head_dim = self._size("attention.key_length", max(1, hidden // heads))
        if self.architecture != "phi3" and self._get("rope.dimension_count", head_dim) != head_dim:
            raise UserError(f"{self.path} rotates only a part of each head, which is not supported in GGUF files")
        experts = self._get("expert_count", 0)
        has_bias = "blk.0.attn_q.bias" in self.tensors
        config = {
            "model_type": "mixtral" if experts and self.architecture == "llama" else ARCHITECTURES[self.architecture],
            "num_hidden_layers": self._layers(),
            "hidden_size": hidden,
            "intermediate_size": self._get("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": self.tensor("token_embd.weight").shape[0],
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._get("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": has_bias,
            "qkv_bias": has_bias,
            "mlp_bias": "blk.0.ffn_up.bias" in self.tensors,
            "eos_token_id": self._eos(),
        }
        if experts:
            config |= self._experts(experts)
        config |= self._own(config)
        types = {tensor.type for tensor in self.tensors.values() if len(tensor.shape) > 1}
        if len(types) == 1 and types < FLOATS.keys():
            config["dtype"] = dtype_name(FLOATS[types.pop()])
        if self.architecture in IN_BFLOAT16 and config.get("dtype") != "float32":
            config["dtype"] = "bfloat16"
        spec_of(config, str(self.path))  # raises for invalid values
        return config

    def _own(self, config: dict) -> dict:
        """What only configs of this architecture have."""
        if self.architecture in LARGEST_GEMMAS:
            return self._gemma(config)
        if self.architecture == "gemma4":
            return self._gemma4(config)
        if self.architecture == "phi3":
            return self._phi3(config)
        return {"sliding_window": self._get("attention.sliding_window")} if self.architecture == "gpt-oss" else {}

    def _experts(self, count: int) -> dict:
        """What only configs of mixtures of experts have, in the spelling of each family."""
        wide = self._size("feed_forward_length")
        used = self._size("expert_used_count")
        is_qwen2 = self.architecture == "qwen2moe"
        inner = self._get("expert_feed_forward_length", wide // used if is_qwen2 else wide)
        return {
            "num_experts": count,
            "num_local_experts": count,
            "num_experts_per_tok": used,
            "moe_intermediate_size": inner,
            "shared_expert_intermediate_size": self._get("expert_shared_feed_forward_length", wide),
            "norm_topk_prob": not is_qwen2,
        }

    def _gemma(self, config: dict) -> dict:
        """What only Gemma's configs have, by the rules of llama.cpp."""
        is_second = self.architecture == "gemma2"
        is_largest = config["num_hidden_layers"] == LARGEST_GEMMAS[self.architecture]
        width = config["hidden_size"] // config["num_attention_heads"]
        own = {
            "query_pre_attn_scalar": width if is_largest else config["head_dim"],
            "sliding_window": self._get("attention.sliding_window", 4096 if is_second else None),
            "attn_logit_softcapping": self._get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self._get("final_logit_softcapping", 30.0 if is_second else 0.0) or None,
            "rope_local_base_freq": self._get("rope.freq_base_swa", 10000.0),
        }
        pattern = self._get("attention.sliding_window_pattern", 2 if is_second else 6)
        if isinstance(pattern, list):
            return own | {"layer_types": [SLIDING if slides else FULL for slides in pattern]}
        return own | {"sliding_window_pattern": pattern}

    def _gemma4(self, config: dict) -> dict:
        """What only Gemma 4's configs have. A file names the sizes of layers without a window first."""
        layers = config["num_hidden_layers"]
        slides = self._per_layer("attention.sliding_window_pattern", layers)
        kv_heads = self._per_layer("attention.head_count_kv", layers)
        head_dims = {True: self._size("attention.key_length_swa"), False: config["head_dim"]}
        own = [{"head_dim": head_dims[bool(kind)], "num_key_value_heads": n} for kind, n in zip(slides, kv_heads)]
        full = {"rope_type": "proportional", "rope_theta": config["rope_theta"]}
        full["partial_rotary_factor"] = self._rotated_share()
        return {
            "num_key_value_heads": kv_heads[0],
            "per_layer_config": {str(index): each for index, each in enumerate(own)},
            "layer_types": [SLIDING if kind else FULL for kind in slides],
            "sliding_window": self._get("attention.sliding_window"),
            "rope_parameters": {FULL: full, SLIDING: {"rope_theta": self._get("rope.freq_base_swa", 10000.0)}},
            "attention_k_eq_v": f"blk.{layers - 1}.attn_v.weight" not in self.tensors,
            "final_logit_softcapping": self._get("final_logit_softcapping", 0.0) or None,
            "hidden_size_per_layer_input": self._get("embedding_length_per_layer_input", 0),
            "num_kv_shared_layers": self._get("attention.shared_kv_layers", 0),
            "enable_moe_block": "num_experts" in config,
            "top_k_experts": config.get("num_experts_per_tok"),
        }

    def _per_layer(self, key: str, layers: int) -> list:
        """A value of each layer, which may be one for all."""
        value = self._get(key)
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers:
            raise UserError(f"{self.path}: {self.architecture}.{key} has {len(values)} values for {layers} layers")
        return values

    def _rotated_share(self) -> float:
        """The share of a head that proportional RoPE rotates, from the file's divisors of the frequencies."""
        divisors = self.dequantised("rope_freqs.weight", torch.float32).float()
        rotated = int((divisors < UNROTATED).sum())
        if not (divisors[:rotated] == 1).all():
            raise UserError(f"{self.path}: the RoPE divisors in rope_freqs.weight are not those of Gemma 4")
        return rotated / len(divisors)

    def _phi3(self, config: dict) -> dict:
        """What only Phi-3's configs have. The first files name no window."""
        head_dim = config["head_dim"]
        window = self._get("attention.sliding_window", 2047 if self._get("context_length") == 4096 else 0)
        partial = self._size("rope.dimension_count", head_dim) / head_dim
        return {
            "partial_rotary_factor": partial,
            "sliding_window": window or None,
            ORIGINAL: self._get("rope.scaling.original_context_length", 4096),
        }

    def _layers(self) -> int:
        count = self._size("block_count")
        last = f"blk.{count - 1}.attn_norm.weight"
        if last not in self.tensors:
            raise UserError(f"{self.path} has no tensor {last!r}, though its block_count is {count}")
        return count

    def _eos(self) -> list[int]:
        """Tokens that end a text: at its end, and at the end of an answer in a conversation."""
        ids = (self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        return [token for token in ids if token is not None]

    def _rope_scaling(self, head_dim: int) -> dict | None:
        if "rope_freqs.weight" in self.tensors and self.architecture != "gemma4":
            return self._llama3_scaling(head_dim)
        if "rope_factors_long.weight" in self.tensors:
            return self._longrope_scaling()
        kind = self._get("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._get("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._get("rope.scaling.original_context_length")
            if self.architecture == "gpt-oss":  # which files do not say
                scaling["truncate"] = False
        return scaling

    def _longrope_scaling(self) -> dict:
        """LongRoPE's two sets of divisors, which apply to texts up to the original length and to longer ones."""
        scaling = {"rope_type": "longrope", "attention_factor": self._get("rope.scaling.attn_factor", 1.0)}
        for which in ("short", "long"):
            name = f"rope_factors_{which}.weight"
            scaling[f"{which}_factor"] = self.dequantised(name, torch.float32).tolist()
        return scaling | {"original_max_position_embeddings": self._get("rope.scaling.original_context_length")}

    def _llama3_scaling(self, head_dim: int) -> dict:
        """LLaMA 3's scaling from the file's divisors of the frequencies: the largest is the factor, which must explain
        the others."""
        divisors = self.dequantised("rope_freqs.weight", torch.float32).float()
        scaling = {"factor": float(divisors.max()), **LLAMA3_ROPE}
        theta = Config({"rope_theta": self._get("rope.freq_base", 10000.0)}, str(self.path)).number("rope_theta")
        positions = self._size("context_length")
        fits = divisors.shape == (head_dim // 2,)
        if fits:
            plain = frequencies(Rope("default", theta, head_dim, positions), positions)[0]
            scaled = frequencies(Rope("llama3", theta, head_dim, positions, tuple(scaling.items())), positions)[0]
            fits = torch.allclose(plain / scaled, divisors, rtol=1e-3)
        if not fits:
            raise UserError(f"{self.path}: the RoPE divisors in rope_freqs.weight are not those of LLaMA 3")
        return {"rope_type": "llama3", **scaling}

    # tensors

    def checkpoint_tensors(self, layers: Sequence[Layer], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name in a Hugging Face checkpoint, tensor) of all tensors in `layers`; those that are quantised in the file
        in `dtype`."""
        for name, stored, found, heads in self.named(layers):
            tensor = self.dequantised(stored, dtype, found)
            if heads:
                tensor = tensor[stored_rows(len(tensor), heads)]
            if self.architecture in LARGEST_GEMMAS and name.endswith("norm.weight"):
                tensor = tensor.float() - 1  # stored as the factor
            yield name, tensor

    def dequantised(self, name: str, dtype: torch.dtype, found: GGUFTensor | None = None) -> Tensor:
        """A tensor by its name in the file, or `found` of it: floats in their own type, others dequantised to `dtype`,
        part by part."""
        import gguf

        found = found or self.tensor(name)
        if found.type in FLOATS:
            raw = np.fromfile(found.path, np.uint8, found.nbytes, offset=found.offset)
            return torch.from_numpy(raw).view(FLOATS[found.type]).view(found.shape)
        width = found.shape[-1]
        out = torch.empty(found.shape, dtype=dtype).view(-1, width)
        row_bytes = found.nbytes // len(out)
        rows = max(1, PART // width)
        try:
            for at in range(0, len(out), rows):
                count = min(rows, len(out) - at)
                data = np.fromfile(found.path, np.uint8, count * row_bytes, offset=found.offset + at * row_bytes)
                decoded = gguf.dequantize(data.reshape(count, -1), gguf.GGMLQuantizationType[found.type])
                out[at : at + count] = torch.from_numpy(decoded)
        except NotImplementedError:
            raise UserError(f"{self.path}: {name!r} is of the type {found.type}, which cannot be read") from None
        return out.view(found.shape)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> GGUFTensor:
        """A tensor by its name in the file. Raises UserError if it is missing, or if its shape is not `shape`."""
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor {name!r}")
        found = self.tensors[name]
        if shape == (1, *found.shape):  # llama.cpp drops dimensions of size 1
            found = found._replace(shape=shape)
        if shape is not None and found.shape != shape:
            has = f"has the shape {list(found.shape)}, its metadata ask for {list(shape)}"
            raise UserError(f"{self.path}: {name!r} {has}")
        return found

    def named(self, layers: Sequence[Layer]) -> Iterator[tuple[str, str, GGUFTensor, int]]:
        """(name in a checkpoint, GGUF's name, tensor, heads whose rows llama.cpp permutes or 0) of all tensors. Raises
        UserError for a tensor that this architecture or the file lacks, or that has another shape."""
        import gguf

        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        names = gguf.get_tensor_name_map(arch, self.config["num_hidden_layers"])
        heads = {}
        if self.architecture == "llama":
            heads = {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}
        for layer in layers:
            for name, shape in layer.shapes.items():
                template, experts = experts_of(name)
                end = next((end for end in RENAMED if name.endswith(end)), "")
                template = template.removesuffix(end) + RENAMED.get(end, "")
                module, _, part = template.replace(".{}", "").rpartition(".")
                stored = names.get_name(module)
                if stored is None:  # a tensor without a module of its own, such as sinks
                    stored = names.get_name(name)
                    part = "weight"
                if stored is None:
                    raise UserError(f"{self.path} has no tensor {name!r}: the config is of another model")
                stored = f"{stored}.{part}"
                if experts:
                    each = (self._size("expert_count"), shape[0] // len(experts), *shape[1:])
                    tensor = self.tensor(stored, each).part(experts)
                else:
                    tensor = self.tensor(stored, shape)
                yield name, stored, tensor, heads.get(module.rpartition(".")[2], 0)
