"""Random weights: the same for every placement, and made from a config.json alone."""

from __future__ import annotations

import shutil

from command_tools import ON_CPU, ON_DISK, ON_GPU, percent

pytest_plugins = ["command_tools"]


def test_dummy_weights_give_the_same_tokens_for_every_placement(generate, model):
    """Only config.json is read; a tensor's elements depend on its name, not on its tier."""
    options = ("--model", model, "--path", "_DUMMY_")
    expected = generate(*options, *percent(ON_GPU))
    assert len({tuple(row["token_ids"]) for row in expected}) > 1
    for six in (ON_CPU, ON_DISK, ("30", "30", "30", "30", "100", "0")):
        assert generate(*options, *percent(six), "--gpu-batch-size", 2, "--num-gpu-batches", 2) == expected


def test_dummy_weights_need_no_weights_and_no_tokenizer(generate, model, texts, tmp_path):
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    assert generate("--model", tmp_path / "bare", "--path", "_DUMMY_") == generate(
        "--model", model, "--path", "_DUMMY_"
    )
