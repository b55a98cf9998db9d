"""A broken config.json or tokenizer ends the command with one line that names what is wrong."""

from __future__ import annotations

import json

import pytest
from command_tools import SHORT, TINY

pytest_plugins = ["command_tools"]


def test_no_config(refused, broken):
    (broken / "config.json").unlink()
    assert "no config.json" in refused("--model", broken, *SHORT)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_config_that_is_not_a_json_object(refused, broken, text):
    (broken / "config.json").write_bytes(text)
    assert "config.json" in refused("--model", broken, *SHORT)


def test_a_config_that_is_a_folder(refused, broken):
    (broken / "config.json").unlink()
    (broken / "config.json").mkdir()
    assert "config.json" in refused("--model", broken, *SHORT)


@pytest.mark.parametrize(
    "key, value",
    [
        ("vocab_size", 2.5),
        ("word_embed_proj_dim", 0),
        ("word_embed_proj_dim", "32"),
        ("activation_function", "no_such_function"),
        ("activation_function", None),
        ("eos_token_id", "two"),
        ("eos_token_id", [2, "two"]),
        ("do_layer_norm_before", "yes"),
    ],
)
def test_a_value_of_the_wrong_type(refused, broken, key, value):
    (broken / "config.json").write_text(json.dumps(TINY | {key: value}))
    message = refused("--model", broken, *SHORT)
    assert key in message or "activation function" in message


@pytest.mark.parametrize("name", ["prelu", "xielu"])
def test_an_activation_with_weights(refused, broken, name):
    (broken / "config.json").write_text(json.dumps(TINY | {"activation_function": name}))
    assert f"'{name}' in the config has weights" in refused("--model", broken, *SHORT)
