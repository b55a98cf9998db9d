"""Every family reads a config as transformers does, and refuses what it cannot compute."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from h2o_flexgen import LLM, Policy, UserError
from h2o_flexgen.models.registry import (
    FAMILIES,
    family,
    head_name,
    known_names,
    named_config,
    named_spec,
    read_spec,
    spec_of,
)
from h2o_flexgen.models.rope import TYPES, Positions, rotation
from h2o_flexgen.models.spec import ModelSpec

LLAMA = dict(vocab_size=50, hidden_size=512, num_hidden_layers=2, intermediate_size=40, num_attention_heads=32)
GEMMAS = ("gemma2", "gemma3_text", "gemma4_text")
#: keys without which a config is of a model that is not supported
ALWAYS = {"gemma4_text": {"hidden_size_per_layer_input": 0}}
#: the keys that a family needs
GOOD = dict.fromkeys(zoo.VARIANTS, LLAMA) | {
    "opt": dict(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        ffn_dim=32,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
    **dict.fromkeys(GEMMAS, dict(hidden_size=512, num_hidden_layers=6, intermediate_size=40)),
}
WITH_ROPE = [model_type for model_type in GOOD if model_type not in ("opt", "gemma4_text")]
#: a tied variant of each family
TIED = {zoo.FAMILY[name]: name for name, config in zoo.CONFIGS.items() if config.get("tie_word_embeddings")}


def config_of(model_type, **changes):
    return {"model_type": model_type, **copy.deepcopy(GOOD[model_type]), **ALWAYS.get(model_type, {}), **changes}


def transformers_config(config):
    return AutoConfig.for_model(**copy.deepcopy(config))


def test_every_family_has_four_variants_in_the_zoo_and_one_of_them_is_tied():
    assert set(FAMILIES) == set(zoo.VARIANTS) == set(TIED)
    assert all(len(variants) >= 4 for variants in zoo.VARIANTS.values())


# what a config means

#: our name of a field -> transformers'
PAIRS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "tied": "tie_word_embeddings",
}
ROPE_PAIRS = {"inner": "intermediate_size", "activation": "hidden_act"}
LLAMA_PAIRS = {"eps": "rms_norm_eps"}
BIASES = {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"}
GEMMA_PAIRS = {
    "eps": "rms_norm_eps",
    "activation": "hidden_activation",
    "final_cap": "final_logit_softcapping",
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
}
OWN_PAIRS = {
    "opt": {
        "inner": "ffn_dim",
        "activation": "activation_function",
        "positions": "max_position_embeddings",
        "word_width": "word_embed_proj_dim",
        "pre_norm": "do_layer_norm_before",
        "bias": "enable_bias",
        "affine": "layer_norm_elementwise_affine",
    },
    "llama": LLAMA_PAIRS | BIASES,
    "mistral": {"eps": "rms_norm_eps", "window": "sliding_window"},
    "gpt_neox": {"eps": "layer_norm_eps", "bias": "attention_bias", "parallel": "use_parallel_residual"},
    "gemma2": GEMMA_PAIRS | {"cap": "attn_logit_softcapping"},
    "gemma3_text": GEMMA_PAIRS,
    "gemma4_text": GEMMA_PAIRS,
    "qwen2_moe": LLAMA_PAIRS
    | {"qkv_bias": "qkv_bias", "experts": "num_experts", "active": "num_experts_per_tok"}
    | {"expert_inner": "moe_intermediate_size", "shared_inner": "shared_expert_intermediate_size"}
    | {"renormalises": "norm_topk_prob"},
    "phi3": {"eps": "rms_norm_eps", "window": "sliding_window"},
    "gpt_oss": LLAMA_PAIRS
    | {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "alpha": "swiglu_alpha", "limit": "swiglu_limit"}
    | {"experts": "num_local_experts", "active": "num_experts_per_tok", "expert_inner": "intermediate_size"},
}


def assert_means(spec, config):
    """A spec agrees with transformers' config."""
    model_type = config.model_type
    assert spec.model_type == model_type
    pairs = PAIRS | ROPE_PAIRS | OWN_PAIRS.get(model_type, LLAMA_PAIRS)
    for ours, theirs in pairs.items():
        assert getattr(spec, ours) == getattr(config, theirs), ours
    eos = config.eos_token_id
    assert spec.eos == (frozenset() if eos is None else {eos} if isinstance(eos, int) else set(eos))
    for layer in range(spec.layers):
        own = config.per_layer_config[layer] if model_type == "gemma4_text" else config
        heads = config.num_attention_heads
        assert spec.at(layer).kv_heads == (getattr(own, "num_key_value_heads", None) or heads)
        assert spec.at(layer).head_dim == (getattr(own, "head_dim", None) or config.hidden_size // heads)
    if model_type == "opt":
        assert spec.final_norm == (config.do_layer_norm_before and not config._remove_final_layer_norm)
        return
    types = getattr(config, "layer_types", None) or [None] * spec.layers
    for layer, kind in enumerate(types):
        assert_rotates(spec.at(layer), config, config.rope_parameters.get(kind, config.rope_parameters))
        if kind is not None:
            assert spec.at(layer).window == (config.sliding_window if kind == "sliding_attention" else None)
    if model_type == "gemma4_text":
        assert spec.scale == 1 and spec.experts == (config.num_experts if config.enable_moe_block else 0)
        assert (spec.active, spec.expert_inner) == (
            (config.top_k_experts, config.moe_intermediate_size) if spec.experts else (0, 0)
        )
        for layer, kind in enumerate(types):
            assert spec.at(layer).values_are_keys == (config.attention_k_eq_v and kind == "full_attention")
    elif model_type in GEMMAS:
        assert spec.scale == config.query_pre_attn_scalar**-0.5 and spec.head_norms == (model_type == "gemma3_text")


def assert_rotates(spec, config, given):
    """The RoPE of a layer agrees with transformers' parameters `given`."""
    given = dict(given)
    if given["rope_type"] == "proportional":
        given = {"partial_rotary_factor": 1.0, "factor": 1.0} | given
        partial = 1.0
    else:
        partial = given.pop("partial_rotary_factor", 1.0)
    assert spec.rope.type == given.pop("rope_type")
    assert spec.rope.theta == given.pop("rope_theta")
    assert spec.rope.dim == int(spec.head_dim * partial)
    assert spec.rope.positions == config.max_position_embeddings <= spec.positions
    ours = dict(spec.rope.scaling)
    if spec.rope.type == "longrope":  # the factor is derived, and tested with the rotation
        given.setdefault("attention_factor", ours["attention_factor"])
    theirs = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key != "type"}
    assert ours == theirs


@pytest.mark.parametrize("name", zoo.CONFIGS)
def test_a_config_is_read_as_by_transformers(tiny, name):
    model = tiny(name)
    assert_means(read_spec(model.folder), model.hf.config)


@pytest.mark.parametrize("model_type", GOOD)
def test_missing_keys_have_the_defaults_of_transformers(model_type):
    config = config_of(model_type)
    assert_means(spec_of(config), transformers_config(config))


@pytest.mark.parametrize("model_type", WITH_ROPE)
def test_null_is_the_default_size(model_type):
    spec = spec_of(config_of(model_type, num_key_value_heads=None))
    assert spec.kv_heads == spec.heads
    assert spec_of(config_of("opt", word_embed_proj_dim=None)).word_width == 16


@pytest.mark.parametrize("sliding", [None, 3, 100])
@pytest.mark.parametrize("model_type", ["opt", "llama", "mistral", "gpt_neox"])
def test_the_sliding_window(model_type, sliding):
    """Any family has one if its config says so: transformers' caches then keep no more."""
    config = config_of(model_type, sliding_window=sliding)
    assert_means(spec_of(config), transformers_config(config))
    assert spec_of(config).window == sliding


@pytest.mark.parametrize("model_type", ["opt", "gpt_neox"])
def test_a_family_without_grouped_attention_reads_no_kv_heads(model_type):
    spec = spec_of(config_of(model_type))
    assert spec_of(config_of(model_type, num_key_value_heads=1, head_dim=64)) == spec


@pytest.mark.parametrize(
    "changes, window",
    [
        (dict(use_sliding_window=True, max_window_layers=0), 4096),
        (dict(use_sliding_window=True, max_window_layers=1, sliding_window=9), 9),
        (dict(use_sliding_window=True, max_window_layers=2, sliding_window=9), None),
        (dict(use_sliding_window=True, sliding_window=9), None),
        (dict(use_sliding_window=False, max_window_layers=0, sliding_window=9), None),
        (dict(use_sliding_window=True, max_window_layers=0, sliding_window=None), None),
        (dict(use_sliding_window=True, sliding_window=9, layer_types=["full_attention", "sliding_attention"]), 9),
        (dict(use_sliding_window=True, sliding_window=9, layer_types=["full_attention"] * 2), None),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_the_sliding_window_of_qwen(model_type, changes, window):
    config = config_of(model_type, **changes)
    spec = spec_of(config)
    assert window in {spec.at(layer).window for layer in range(spec.layers)} <= {None, window}
    assert_means(spec, transformers_config(config))


# Gemma

TEXT = dict(model_type="gemma3_text", hidden_size=512, num_hidden_layers=6, intermediate_size=40, sliding_window=9)


@pytest.mark.parametrize(
    "text", [TEXT, TEXT | dict(rope_scaling={"rope_type": "linear", "factor": 8.0}), TEXT | dict(vocab_size=99)]
)
def test_the_text_model_of_a_multimodal_gemma_3(text):
    """Its config leaves out sizes that are transformers' defaults."""
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {}}
    found = spec_of(config)
    assert found == spec_of({**text, "eos_token_id": [1, 106]})
    assert_means(replace(found, eos=frozenset({1})), transformers_config(config).text_config)
    assert (found.heads, found.kv_heads, found.head_dim, found.positions) == (8, 4, 256, 131072)


def test_a_multimodal_gemma_3_from_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "eos_token_id": 1, "text_config": TEXT}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    assert read_spec(tmp_path).eos == {1, 106}
    assert "text_config must be an object" in refusal({"model_type": "gemma3", "text_config": [TEXT]})
    assert "hidden_size must be" in refusal({"model_type": "gemma3"})


@pytest.mark.parametrize("model_type", GEMMAS)
@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(use_bidirectional_attention=True), "attention to later tokens"),
        (dict(layer_types=["full_attention"]), "layer_types must be a list of 6 times"),
        (dict(layer_types=["chunked_attention"] * 6), "layer_types must be a list of 6 times"),
        (dict(layer_types="full_attention"), "layer_types must be a list of 6 times"),
        (dict(query_pre_attn_scalar=0), "query_pre_attn_scalar must be a positive number"),
        (dict(final_logit_softcapping=-1.0), "final_logit_softcapping must be a positive number"),
        (dict(sliding_window="wide"), "sliding_window must be a whole number"),
        (dict(hidden_activation=3), "hidden_activation must be a text"),
    ],
)
def test_what_gemma_cannot_have_is_refused(model_type, changes, says):
    assert says in refusal(config_of(model_type, **changes))


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(rope_parameters={"rope_type": "default"}), "must be an object with full_attention and sliding_attention"),
        (dict(rope_parameters=[1]), "must be an object with full_attention and sliding_attention"),
        (dict(rope_parameters={"full_attention": 3}), "must hold objects"),
        (dict(rope_scaling="linear"), "rope_scaling must hold objects"),
        (dict(rope_local_base_freq=-1), "rope_local_base_freq must be a positive number"),
        (dict(sliding_window_pattern=0), "sliding_window_pattern must be a whole number"),
    ],
)
def test_what_gemma_3_cannot_have_is_refused(changes, says):
    assert says in refusal(config_of("gemma3_text", **changes))


GEMMA4 = dict(model_type="gemma4_text", **GOOD["gemma4_text"], **ALWAYS["gemma4_text"])


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(hidden_size_per_layer_input=None), "embeddings for each layer"),
        (dict(hidden_size_per_layer_input=256), "embeddings for each layer"),
        (dict(num_kv_shared_layers=2), "layers that share keys and values"),
        (dict(use_bidirectional_attention="all"), "attention to later tokens"),
        (dict(global_head_dim=0), "global_head_dim must be a whole number"),
        (dict(attention_k_eq_v="yes"), "attention_k_eq_v must be true or false"),
        (dict(attention_k_eq_v=True, num_global_key_value_heads=3), "not divisible by num_key_value_heads 3"),
        (dict(enable_moe_block=1), "enable_moe_block must be true or false"),
        (dict(enable_moe_block=True), "num_experts must be a whole number"),
        (dict(per_layer_config=[1]), "per_layer_config must hold objects with head_dim and num_key_value_heads"),
        (dict(per_layer_config={"5": {"sliding_window": 3}}), "per_layer_config must hold objects"),
        (dict(per_layer_config={"5": {"head_dim": 7}}), "RoPE cannot rotate 7"),
        (dict(rope_parameters={"full_attention": 3}), "must hold objects"),
        (
            dict(rope_parameters={"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}),
            "1.5 of a head cannot be rotated",
        ),
    ],
)
def test_what_gemma_4_cannot_have_is_refused(changes, says):
    assert says in refusal(GEMMA4 | changes)


def test_a_multimodal_gemma_4_in_the_spelling_of_published_configs():
    text = GEMMA4 | dict(global_head_dim=64, head_dim=32, num_global_key_value_heads=2, attention_k_eq_v=True)
    found = spec_of({"model_type": "gemma4", "eos_token_id": [1, 106], "text_config": text, "vision_config": {}})
    assert [(kind.head_dim, kind.kv_heads, kind.window) for kind in found.kinds] == [(32, 4, 512), (64, 2, None)]
    assert found.eos == {1, 106}
    assert_means(replace(found, eos=frozenset({1})), transformers_config(text))


# two spellings of RoPE

SCALINGS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "beta_fast": 16.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64},
    "proportional": {},
}


def scaling_of(rope_type: str, model_type: str, **changes) -> dict:
    """A scaling with a divisor for each pair of a head."""
    pairs = spec_of(config_of(model_type, **changes)).rope.dim // 2
    scaling = SCALINGS[rope_type].items()
    return {key: value[:1] * pairs if isinstance(value, list) else value for key, value in scaling}


@pytest.mark.parametrize(
    "model_type, rope_type",
    [(m, t) for m in WITH_ROPE for t in TYPES if m != "phi3" or t in ("default", "longrope")],
)
def test_old_and_new_spelling_of_rope_are_one_spec(model_type, rope_type):
    neox = model_type == "gpt_neox"
    theta, partial = ("rotary_emb_base", {"rotary_pct": 0.5}) if neox else ("rope_theta", {"head_dim": 16})
    more = {"max_position_embeddings": 256}
    scaling = scaling_of(rope_type, model_type, **partial)
    old = [
        config_of(model_type, rope_scaling={key: rope_type, **scaling}, **more, **partial, **{theta: 5e5})
        for key in ("type", "rope_type")
    ]
    new_partial = {"partial_rotary_factor": 0.5} if neox else {}
    parameters = {"rope_type": rope_type, "rope_theta": 5e5, **scaling, **new_partial}
    more |= {} if neox else partial
    new = config_of(model_type, rope_parameters=of_family(model_type, parameters), **more)
    transformers = transformers_config(old[1])
    specs = [spec_of(config) for config in (*old, new, json.loads(transformers.to_json_string()))]
    assert all(spec == specs[0] for spec in specs)
    assert specs[0].rope.type == rope_type and specs[0].rope.theta == 5e5
    assert_means(specs[0], transformers)


def of_family(model_type, parameters: dict) -> dict:
    """`rope_parameters` as a family wants them."""
    return {"full_attention": parameters} if model_type == "gemma3_text" else parameters


@pytest.mark.parametrize("rope_type", [rope_type for rope_type in TYPES if rope_type not in ("default", "longrope")])
def test_phi_3_has_no_other_rope(rope_type):
    says = refusal(config_of("phi3", rope_scaling={"rope_type": rope_type, **scaling_of(rope_type, "llama")}))
    assert f"no RoPE of the type {rope_type}" in says


def test_longrope_in_the_spellings_of_phi_3():
    """By its first name, and with its original length outside the scaling."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    original = {"original_max_position_embeddings": 64}
    spellings = [
        dict(rope_scaling={"type": "longrope", **factors, **original}),
        dict(rope_scaling={"type": "longrope", **factors}, **original),
        dict(rope_scaling={"type": "su", **factors}, **original),
    ]
    specs = {spec_of(config_of("llama", max_position_embeddings=256, **spelling)) for spelling in spellings}
    assert [spec.positions for spec in specs] == [256]


@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
@pytest.mark.parametrize(
    "value", [None, [], [1.0] * 7, [1.0] * 9, [1.0] * 7 + [0], [1.0] * 7 + [True], ["1.0"] * 8, 1.0, [1e400] * 8]
)
def test_invalid_divisors_of_longrope_are_refused(key, value):
    says = refusal(config_of("llama", rope_scaling={"rope_type": "longrope", **SCALINGS["longrope"], key: value}))
    assert f"{key} must be a list of 8 positive numbers" in says


@pytest.mark.parametrize("model_type", WITH_ROPE)
def test_no_scaling_is_the_default_rope(model_type):
    default = spec_of(config_of(model_type))
    assert default.rope.type == ("yarn" if model_type == "gpt_oss" else "default")
    for nothing in (None, {}):
        assert spec_of(config_of(model_type, rope_scaling=nothing, rope_parameters=nothing)) == default


@pytest.mark.parametrize(
    "rope_type, trained, positions",
    [
        ("default", 256, 256),
        ("linear", 256, 512),
        ("dynamic", 256, 1024),
        ("llama3", 256, 256),
        ("longrope", 256, 256),
        ("yarn", 256, 256),
        ("yarn", 64, 256),  # Qwen2.5 has the trained length in both keys, others the stretched one here
    ],
)
def test_scaling_extends_the_trained_positions(rope_type, trained, positions):
    scaling = {"rope_type": rope_type, **SCALINGS[rope_type]}
    assert spec_of(config_of("llama", max_position_embeddings=trained, rope_scaling=scaling)).positions == positions


# end of text


@pytest.mark.parametrize("model_type", GOOD)
@pytest.mark.parametrize("eos, ids", [(2, {2}), ([2, 5], {2, 5}), (None, set()), ([], set())])
def test_any_number_of_eos_ids(model_type, eos, ids):
    assert spec_of(config_of(model_type, eos_token_id=eos)).eos == ids


@pytest.mark.parametrize(
    "generation, ids",
    [({"eos_token_id": [7, 8]}, {3, 7, 8}), ({"eos_token_id": 7}, {3, 7}), ({"eos_token_id": None}, {3}), ({}, {3})],
)
def test_generation_config_adds_eos_ids(tmp_path, generation, ids):
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama", eos_token_id=3)))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_spec(tmp_path).eos == ids


# named sizes


def parameters_of(spec):
    tensors = {}
    for layer in family(spec.model_type).tensors(spec):
        tensors |= layer.shapes
    return sum(torch.Size(shape).numel() for shape in tensors.values())


#: parameters of published checkpoints, as the hub shows them
COUNTS = {
    "meta-llama/Llama-2-7b-hf": 6738415616,
    "meta-llama/Llama-2-13b-hf": 13015864320,
    "meta-llama/Llama-2-70b-hf": 68976648192,
    "meta-llama/Llama-3.1-8B": 8030261248,
    "meta-llama/Llama-3.1-70B": 70553706496,
    "meta-llama/Llama-3.2-1B": 1235814400,
    "meta-llama/Llama-3.2-3B": 3212749824,
    "mistralai/Mistral-7B-v0.3": 7248023552,
    "Qwen/Qwen2.5-0.5B": 494032768,
    "Qwen/Qwen2.5-1.5B": 1543714304,
    "Qwen/Qwen2.5-3B": 3085938688,
    "Qwen/Qwen2.5-7B": 7615616512,
    "Qwen/Qwen2.5-14B": 14770033664,
    "Qwen/Qwen2.5-32B": 32763876352,
    "Qwen/Qwen2.5-72B": 72706203648,
    "mistralai/Mixtral-8x7B-v0.1": 46702792704,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46702792704,
    "mistralai/Mixtral-8x22B-v0.1": 140630071296,
    "Qwen/Qwen1.5-MoE-A2.7B": 14315784192,
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": 14315784192,
    "Qwen/Qwen3-30B-A3B": 30532122624,
    "openai/gpt-oss-20b": 20914757184,
    "openai/gpt-oss-120b": 116829156672,
    "EleutherAI/pythia-70m": 70426624,
    "EleutherAI/pythia-160m": 162322944,
    "EleutherAI/pythia-410m": 405334016,
    "EleutherAI/pythia-1b": 1011781632,
    "EleutherAI/pythia-1.4b": 1414647808,
    "EleutherAI/pythia-2.8b": 2775208960,
    "EleutherAI/pythia-6.9b": 6857302016,
    "EleutherAI/pythia-12b": 11846072320,
    "EleutherAI/gpt-neox-20b": 20554567680,
    "google/gemma-2-2b": 2614341888,
    "google/gemma-2-2b-it": 2614341888,
    "google/gemma-2-9b": 9241705984,
    "google/gemma-2-27b": 27227128320,
    "google/gemma-3-270m": 268098176,
    "google/gemma-3-1b-pt": 999885952,
    "microsoft/Phi-3-mini-4k-instruct": 3821079552,
    "microsoft/Phi-3-mini-128k-instruct": 3821079552,
    "microsoft/Phi-3.5-mini-instruct": 3821079552,
    "microsoft/phi-4": 14659507200,
    "microsoft/Phi-4-mini-instruct": 3836021760,
}


@pytest.mark.parametrize("name", COUNTS)
def test_named_sizes_have_as_many_parameters_as_the_published_checkpoints(name):
    assert parameters_of(named_spec(name)) == COUNTS[name]


@pytest.mark.parametrize("name", sorted(set(known_names()) - set(COUNTS)))
def test_other_named_sizes_have_about_as_many_parameters_as_their_name_says(name):
    number, unit = re.findall(r"-([\d.]+)([mb])\b", name.lower())[-1]
    assert parameters_of(named_spec(name)) == pytest.approx(float(number) * {"m": 1e6, "b": 1e9}[unit], rel=0.25)


@pytest.mark.parametrize("name", known_names())
def test_named_sizes_are_read_as_by_transformers(name):
    assert_means(named_spec(name), transformers_config(named_config(name)))


@pytest.mark.parametrize(
    "name, alias",
    [
        ("facebook/opt-30b", "opt-30b"),
        ("facebook/opt-30b", "facebook/opt-iml-max-30b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-hf", "Llama-2-7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("EleutherAI/pythia-1b", "pythia-1b"),
    ],
)
def test_names_need_neither_owner_nor_capitals(name, alias):
    assert named_spec(alias) == named_spec(name) is not None


@pytest.mark.parametrize("name", ["facebook/opt-9b", "meta/opt-30b", "llama", "", "pythia"])
def test_other_names_are_unknown(name):
    assert named_spec(name) is None


# configs that are refused


def refusal(config) -> str:
    with pytest.raises(UserError) as e:
        spec_of(config)
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize("model_type", ["mamba", "dbrx", "deepseek_v3", "gpt2", None, 3, ["llama"], ""])
def test_an_unknown_family_is_refused_with_a_list_of_the_known_ones(model_type):
    says = refusal({**config_of("llama"), "model_type": model_type})
    assert repr(model_type) in says
    assert all(known in says for known in FAMILIES)


@pytest.mark.parametrize("model_type", GOOD)
@pytest.mark.parametrize("quantized", [{"quant_method": "quanto", "bits": 4}, {}, "awq"])
def test_a_checkpoint_quantised_by_an_unknown_method_is_refused(model_type, quantized):
    assert "quantised" in refusal(config_of(model_type, quantization_config=quantized))
    known = {"quant_method": "gptq", "bits": 4}
    assert spec_of(config_of(model_type, quantization_config=known)) == spec_of(config_of(model_type))


@pytest.mark.parametrize("model_type, key", [(m, key) for m, keys in GOOD.items() for key in keys])
def test_a_missing_or_invalid_size_is_refused(model_type, key):
    config = config_of(model_type)
    del config[key]
    assert key in refusal(config)
    for value in (0, -1, 2.5, True, None, [4], 10**400):
        assert key in refusal(config | {key: value})


@pytest.mark.parametrize("key, most", [("num_hidden_layers", 1000), ("head_dim", 65536)])
def test_a_size_that_would_fill_memory_is_refused(key, most):
    assert f"{key} must be a whole number from 1 to {most}" in refusal(config_of("llama", **{key: most + 1}))


@pytest.mark.parametrize("model_type, kv_heads", [("llama", 3), ("mistral", 31), ("qwen2", 33), ("qwen3", 64)])
def test_kv_heads_that_do_not_divide_the_heads_are_refused(model_type, kv_heads):
    says = refusal(config_of(model_type, num_key_value_heads=kv_heads))
    assert f"32 is not divisible by num_key_value_heads {kv_heads}" in says


@pytest.mark.parametrize("model_type", ["opt", "llama", "mistral", "qwen2", "gpt_neox"])
def test_heads_that_do_not_divide_the_hidden_size_are_refused(model_type):
    changes = dict(num_attention_heads=7, num_key_value_heads=7) if model_type != "opt" else dict(num_attention_heads=3)
    assert "not divisible" in refusal(config_of(model_type, **changes))


@pytest.mark.parametrize("model_type", WITH_ROPE)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope_type_is_refused_with_a_list_of_the_known_ones(model_type, key):
    for rope_type in ("axial", "mrope", "", "LINEAR"):
        parameters = {"rope_type": rope_type, "factor": 2.0}
        parameters = of_family(model_type, parameters) if key == "rope_parameters" else parameters
        says = refusal(config_of(model_type, **{key: parameters}))
        assert repr(rope_type) in says and all(known in says for known in TYPES)


@pytest.mark.parametrize("model_type", WITH_ROPE)
@pytest.mark.parametrize("rope_type, missing", [(t, key) for t, needed in TYPES.items() for key in needed])
def test_a_missing_or_invalid_rope_parameter_is_refused(model_type, rope_type, missing):
    scaling = {"rope_type": rope_type, **SCALINGS[rope_type]}
    del scaling[missing]
    assert missing in refusal(config_of(model_type, rope_scaling=scaling))
    for value in (None, "2", 0, -1.0, True, float("inf")):
        assert missing in refusal(config_of(model_type, rope_scaling=scaling | {missing: value}))


@pytest.mark.parametrize("scaling", ["linear", 2.0, ["linear", 2.0], True])
def test_a_rope_scaling_that_is_not_an_object_is_refused(scaling):
    assert "rope_scaling" in refusal(config_of("llama", rope_scaling=scaling))


@pytest.mark.parametrize("changes", [dict(rotary_pct=0.2), dict(rotary_pct=1.5), dict(num_attention_heads=256)])
def test_elements_that_cannot_be_rotated_in_pairs_are_refused(changes):
    assert "cannot rotate" in refusal(config_of("gpt_neox", **changes))
    assert "cannot rotate 7" in refusal(config_of("llama", head_dim=7))


ROPE_KEYS = (
    "factor rope_theta low_freq_factor high_freq_factor original_max_position_embeddings attention_factor beta_fast "
    "beta_slow mscale mscale_all_dim truncate partial_rotary_factor"
).split()


def assert_angles_are_finite(spec, position):
    x = torch.ones(2, 1, spec.head_dim)
    at = torch.tensor([0, position])
    assert torch.isfinite(rotation(spec.rope, Positions(at, at + 1), x)(x)).all()


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "1", "default", "yarn", "gelu"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)
OTHER_KEYS = (
    "num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings rope_theta rope_scaling "
    "rope_parameters rotary_pct rotary_emb_base rms_norm_eps layer_norm_eps attention_bias mlp_bias hidden_act "
    "eos_token_id tie_word_embeddings use_parallel_residual sliding_window use_sliding_window max_window_layers "
    "layer_types word_embed_proj_dim do_layer_norm_before quantization_config hidden_activation rope_local_base_freq "
    "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping sliding_window_pattern partial_rotary_factor "
    "use_bidirectional_attention swiglu_alpha swiglu_limit num_local_experts num_experts_per_tok num_experts qkv_bias "
    "hidden_size_per_layer_input num_kv_shared_layers global_head_dim num_global_key_value_heads attention_k_eq_v "
    "per_layer_config enable_moe_block top_k_experts moe_intermediate_size shared_expert_intermediate_size "
    "mlp_only_layers decoder_sparse_step norm_topk_prob"
).split()


@settings(max_examples=100)
@given(
    model_type=st.sampled_from(list(GOOD)),
    rope_type=st.sampled_from(list(TYPES)),
    rope_junk=st.dictionaries(st.sampled_from(ROPE_KEYS), JUNK, max_size=2),
    data=st.data(),
)
def test_any_config_is_a_model_or_a_user_error(model_type, rope_type, rope_junk, data):
    keys = [*GOOD[model_type], *OTHER_KEYS]
    junk = data.draw(st.dictionaries(st.sampled_from(keys), JUNK, max_size=2), "junk")
    scaling = {"rope_type": rope_type, **SCALINGS[rope_type], **rope_junk}
    try:
        spec = spec_of({**config_of(model_type), "rope_scaling": scaling, "use_sliding_window": True, **junk})
    except UserError as e:
        assert "\n" not in str(e)
        return
    assert isinstance(spec, ModelSpec) and isinstance(hash(spec), int)
    if spec.rope is not None and spec.head_dim < 1000:
        assert_angles_are_finite(spec, 1)


# tied models


@pytest.mark.parametrize("name", TIED.values())
def test_a_tied_model_may_have_a_head_of_its_own_only_if_it_equals_the_embedding(tiny, tmp_path, name):
    """transformers would not tie them otherwise, and would generate other tokens."""
    folder = tmp_path / "model"
    shutil.copytree(tiny(name).folder, folder)
    spec = read_spec(folder)
    state = load_file(folder / "model.safetensors")
    words = state[head_name(spec)]
    head = head_name(replace(spec, tied=False))

    def load(own_head):
        save_file({**state, head: own_head}, folder / "model.safetensors")
        LLM(str(folder), Policy(), device="cpu", dtype="float32", progress=False).close()

    load(words.clone())
    last_row_differs = words.index_fill(0, torch.tensor([len(words) - 1]), 0.5)
    for other in (words[:-1].clone(), words + 1e-3, words.char(), last_row_differs):
        with pytest.raises(UserError, match=f"'{re.escape(head)}'.*tie_word_embeddings"):
            load(other)


# texts that are too long


@pytest.mark.parametrize("name", ["llama_groups_of_8_dynamic", "llama_yarn", "gpt_neox"])
def test_a_prompt_longer_than_the_positions_is_refused(tiny, name):
    """Positions include those that dynamic RoPE and yarn add."""
    spec = read_spec(tiny(name).folder)
    spec.check_length(spec.positions - 6, 6)
    with pytest.raises(UserError, match=f"{spec.positions} positions"):
        spec.check_length(spec.positions - 5, 6)


def test_a_prompt_may_be_longer_than_the_sliding_window():
    spec = spec_of(config_of("mistral", sliding_window=20))
    spec.check_length(spec.positions - 6, 6)
