"""Model configurations: read from a checkpoint folder, or built in by name. Pure Python, no torch.

Sizes of the facebook/opt family: OPT (arXiv 2205.01068), table 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from h2o_flexgen.errors import UserError

#: name -> (layers, hidden size, heads)
OPT_SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "1.3b": (24, 2048, 32),
    "2.7b": (32, 2560, 32),
    "6.7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "66b": (64, 9216, 72),
    "175b": (96, 12288, 96),
}


_SWITCHES = (
    "do_layer_norm_before",
    "enable_bias",
    "layer_norm_elementwise_affine",
    "tie_word_embeddings",
    "_remove_final_layer_norm",
)


def _is_size(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_token(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fits(key: str, value) -> bool:
    """Whether a value is of the type that the field of that name wants."""
    if key in _SWITCHES:
        return isinstance(value, bool)
    if key == "activation_function":
        return isinstance(value, str)
    if key == "eos_token_id":
        return value is None or _is_token(value) or (isinstance(value, list) and all(map(_is_token, value)))
    return _is_size(value)


@dataclass(frozen=True)
class OPTConfig:
    """The fields of transformers' OPTConfig that inference needs, under the same names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    ffn_dim: int
    num_attention_heads: int
    max_position_embeddings: int
    word_embed_proj_dim: int
    do_layer_norm_before: bool = True
    activation_function: str = "relu"
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True
    _remove_final_layer_norm: bool = False
    eos_token_id: int | list[int] | None = 2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def has_final_norm(self) -> bool:
        return self.do_layer_norm_before and not self._remove_final_layer_norm

    @property
    def has_projection(self) -> bool:
        return self.word_embed_proj_dim != self.hidden_size

    @property
    def eos_ids(self) -> frozenset[int]:
        eos = self.eos_token_id
        return frozenset(() if eos is None else eos if isinstance(eos, list) else (eos,))

    def check_length(self, prompt_len: int, gen_len: int) -> None:
        """Raises UserError unless there are positions for a prompt and an output of these lengths."""
        if prompt_len + gen_len > self.max_position_embeddings:
            raise UserError(
                f"prompt of {prompt_len} tokens + output of {gen_len} is longer than the model's "
                f"{self.max_position_embeddings} positions"
            )

    @classmethod
    def from_dict(cls, data: dict, where: str = "the config") -> OPTConfig:
        """Raises UserError: not an OPT config, a key that is missing, or sizes that do not fit."""
        if data.get("model_type", "opt") != "opt":
            raise UserError(f"{where}: architecture {data['model_type']!r} is not supported, only OPT")
        needed = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "ffn_dim",
            "num_attention_heads",
            "max_position_embeddings",
        )
        for key in needed:
            if key not in data:
                raise UserError(f"{where}: the key {key!r} is missing")
            if not _is_size(data[key]):
                raise UserError(f"{where}: {key} must be a whole number, 1 or more, not {data[key]!r}")
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        if values.get("word_embed_proj_dim") is None:
            values["word_embed_proj_dim"] = data["hidden_size"]
        for key, value in values.items():
            if not _fits(key, value):
                raise UserError(f"{where}: {key} cannot be {value!r}")
        config = cls(**values)
        if config.hidden_size % config.num_attention_heads:
            raise UserError(
                f"{where}: hidden_size {config.hidden_size} is not divisible by "
                f"num_attention_heads {config.num_attention_heads}"
            )
        return config

    @classmethod
    def from_folder(cls, folder: Path) -> OPTConfig:
        path = folder / "config.json"
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise UserError(f"no config.json in {folder}: is this a model folder?") from None
        except (OSError, ValueError, RecursionError) as e:
            raise UserError(f"cannot read {path}: {e}") from None
        if not isinstance(data, dict):
            raise UserError(f"{path} does not hold a JSON object")
        return cls.from_dict(data, str(path))

    @classmethod
    def named(cls, name: str) -> OPTConfig | None:
        """The built-in configuration of a facebook/opt or facebook/opt-iml size, or None."""
        owner, _, model = name.rpartition("/")
        if owner not in ("", "facebook") or not model.startswith("opt-"):
            return None
        size = model.removeprefix("opt-").removeprefix("iml-").removeprefix("max-")
        if size not in OPT_SIZES:
            return None
        layers, hidden, heads = OPT_SIZES[size]
        return cls(
            vocab_size=50272,
            hidden_size=hidden,
            num_hidden_layers=layers,
            ffn_dim=4 * hidden,
            num_attention_heads=heads,
            max_position_embeddings=2048,
            word_embed_proj_dim=512 if size == "350m" else hidden,
            do_layer_norm_before=size != "350m",
        )
