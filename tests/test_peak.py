"""The peak of a whole job against its plan, in a process of its own."""

from __future__ import annotations

import json

import pytest
from cli_tools import FP32, ON_DISK, ON_GPU, TINY, end, percent, start

#: so much larger than the interpreter that its weights, cache and workspaces decide
LARGE = TINY | {
    "vocab_size": 30000,
    "hidden_size": 1024,
    "word_embed_proj_dim": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("budget", [(), ("--hh-ratio", 0.2)], ids=["full", "h2o"])
@pytest.mark.parametrize("home", [ON_GPU, ("100", "0", "0", "0", "100", "0"), ON_DISK], ids=["ram", "cache", "disk"])
def test_the_peak_stays_near_the_plan(tmp_path, home, budget):
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    report = tmp_path / "report.json"
    job = ("--model", tmp_path, "--path", "_DUMMY_", *FP32, "--prompt-len", 96, "--gen-len", 4, "--num-prompts", 24)
    where = ("--gpu-batch-size", 16, "--num-gpu-batches", 2, *percent(home), "--offload-dir", tmp_path / "offload")
    code, _, err = end(start(*job, *where, *budget, "--report", report))
    assert code == 0, err
    found = json.loads(report.read_text())
    peak, planned = (sum(found[f"{which}_memory_bytes"][t] for t in ("gpu", "cpu")) for which in ("peak", "planned"))
    assert 0.85 * planned < peak < 1.05 * planned
    peak, planned = (found[f"{which}_memory_bytes"]["disk"] for which in ("peak", "planned"))
    assert 0.99 * planned <= peak <= planned
