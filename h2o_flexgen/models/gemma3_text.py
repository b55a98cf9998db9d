"""Gemma 3 (arXiv 2503.19786), its text model: Gemma 2 with norms of queries and keys instead of soft caps, and a window
and another RoPE in five of six layers."""

from __future__ import annotations

from dataclasses import replace

from h2o_flexgen.models import gemma2
from h2o_flexgen.models.gemma2 import GemmaSpec, block, embed, final_states, gemma_spec, logits, tensors
from h2o_flexgen.models.rope import read_rope
from h2o_flexgen.models.spec import FULL, SLIDING, Config, of_layers, shortened

__all__ = ["block", "embed", "final_states", "logits", "named", "spec", "tensors"]

#: as in `gemma2.SIZES`
SIZES = {
    "google/gemma-3-270m": (18, 640, 2048, 4, 1, 256, 262144, 32768, 1e6, True, 256),
    "google/gemma-3-1b-pt": (26, 1152, 6912, 4, 1, 256, 262144, 32768, 1e6, True, 256),
    "google/gemma-3-4b-pt": (34, 2560, 10240, 8, 4, 256, 262208, 131072, 1e6, True, 256),
    "google/gemma-3-12b-pt": (48, 3840, 15360, 16, 8, 256, 262208, 131072, 1e6, True, 256),
    "google/gemma-3-27b-pt": (62, 5376, 21504, 32, 16, 128, 262208, 131072, 1e6, True, 168),
}
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
#: type of a layer -> theta's key in the old spelling, and its default
THETAS = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}


def spec(config: Config) -> GemmaSpec:
    config = Config(DEFAULTS | config.data, config.where)
    read = gemma_spec(with_rope(config, FULL), model_type="gemma3_text", head_norms=True)
    if read.rope.type == "linear":  # `max_position_embeddings` counts what scaling adds
        read = replace(read, positions=read.rope.positions)
    rope, _ = read_rope(with_rope(config, SLIDING), read.head_dim)
    period = config.size("sliding_window_pattern", 6)
    by_type = {FULL: read, SLIDING: replace(read, rope=rope, window=config.window(4096))}
    return of_layers([by_type[kind] for kind in config.layer_types(lambda index: (index + 1) % period != 0)])


def with_rope(config: Config, kind: str) -> Config:
    """The config with the RoPE of one type of layers as its only one. Raises UserError for one without types."""
    data = config.data
    by_kind = data.get("rope_parameters") or {kind: None}
    if not isinstance(by_kind, dict) or not by_kind.keys() <= THETAS.keys():
        raise config.error(f"rope_parameters must be an object with {FULL} and {SLIDING}, not {shortened(by_kind)}")
    rope = by_kind.get(kind) or {}
    scaling = (kind == FULL and data.get("rope_scaling")) or {}
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        raise config.error(f"rope_parameters and rope_scaling must hold objects, not {shortened([rope, scaling])}")
    theta = config.number(*THETAS[kind])
    merged = {"rope_theta": theta} | rope | scaling
    return Config(data | {"rope_theta": theta, "rope_parameters": None, "rope_scaling": merged}, config.where)


def named() -> dict[str, dict]:
    found = gemma2.configs(SIZES)
    for config in found.values():
        config["sliding_window"] = 512 if config["hidden_size"] < 2560 else 1024
        if config["sliding_window"] == 1024:
            config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    return found
