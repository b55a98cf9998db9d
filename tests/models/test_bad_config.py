"""A config.json or a tokenizer that is broken ends in one line that names what is wrong."""

from __future__ import annotations

import json

import pytest
from cli_tools import SHORT, TINY

pytest_plugins = ["cli_tools"]


def test_no_config(refused, broken):
    (broken / "config.json").unlink()
    assert "no config.json" in refused("--model", broken, *SHORT)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_config_that_is_no_json_object(refused, broken, text):
    (broken / "config.json").write_bytes(text)
    assert "config.json" in refused("--model", broken, *SHORT)


def test_a_config_that_is_a_folder(refused, broken):
    (broken / "config.json").unlink()
    (broken / "config.json").mkdir()
    assert "config.json" in refused("--model", broken, *SHORT)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_hidden_layers", "ffn_dim", "num_attention_heads", "max_position_embeddings"],
)
@pytest.mark.parametrize("value", ["missing", 0, -1, 2.5, "32", None, True])
def test_a_size_in_the_config_that_is_none(refused, broken, key, value):
    config = {k: v for k, v in TINY.items() if k != key} | ({} if value == "missing" else {key: value})
    (broken / "config.json").write_text(json.dumps(config))
    assert key in refused("--model", broken, *SHORT)


@pytest.mark.parametrize(
    "key, value",
    [
        ("word_embed_proj_dim", 0),
        ("word_embed_proj_dim", "32"),
        ("word_embed_proj_dim", 16.5),
        ("activation_function", "no_such_function"),
        ("activation_function", ["relu"]),
        ("activation_function", None),
        ("eos_token_id", "two"),
        ("eos_token_id", [2, "two"]),
        ("eos_token_id", {"id": 2}),
        ("do_layer_norm_before", "yes"),
        ("enable_bias", 1.5),
        ("tie_word_embeddings", "true"),
    ],
)
def test_another_key_of_the_config_of_a_wrong_type(refused, broken, key, value):
    (broken / "config.json").write_text(json.dumps(TINY | {key: value}))
    message = refused("--model", broken, *SHORT)
    assert key in message or "activation function" in message


@pytest.mark.parametrize("name", ["prelu", "xielu"])
def test_an_activation_with_weights_of_its_own(refused, broken, name):
    (broken / "config.json").write_text(json.dumps(TINY | {"activation_function": name}))
    assert f"'{name}' in the config has weights" in refused("--model", broken, *SHORT)


def test_another_architecture(refused, broken):
    (broken / "config.json").write_text(json.dumps(TINY | {"model_type": "mamba"}))
    message = refused("--model", broken, *SHORT)
    assert "mamba" in message and "opt" in message and "llama" in message


def test_heads_that_do_not_divide_the_hidden_size(refused, broken):
    (broken / "config.json").write_text(json.dumps(TINY | {"num_attention_heads": 5}))
    message = refused("--model", broken, *SHORT)
    assert "32" in message and "5" in message and "divisible" in message


def test_a_size_that_is_not_the_checkpoints(refused, broken):
    (broken / "config.json").write_text(json.dumps(TINY | {"vocab_size": 130}))
    message = refused("--model", broken, *SHORT)
    assert "embed_tokens" in message and "[128, 32]" in message and "[130, 32]" in message


def test_a_tokenizer_that_cannot_be_read(refused, broken):
    (broken / "tokenizer.json").write_text("{")
    assert "tokenizer" in refused("--model", broken, *SHORT)
