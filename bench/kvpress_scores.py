"""Teacher-forced log-probabilities under the presses of NVIDIA's kvpress, for bench/kvpress_peer.py; runs in
kvpress's own environment.

    FOLDER/kvpress/bin/python -m bench.kvpress_scores JOB.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import kvpress
import torch
from kvpress import AdaKVPress, DecodingPress, PrefillDecodingPress
from transformers import AutoModelForCausalLM, DynamicCache


@dataclass(frozen=True)
class Tried:
    """A press for the prompt and one for the steps behind it.

    Attributes:
        prompt, step: make them; `step` may have a shorter window of queries, since few are known.
        interval: steps between compressions; scorers that need hidden states only have those of one interval.
        is_adaptive: whether AdaKV shares the slots out among a layer's heads.
        attention: transformers' implementation.
    """

    prompt: Callable
    step: Callable | None = None
    interval: int = 1
    is_adaptive: bool = False
    attention: str = "sdpa"

    def press(self, slots: int, prompt_len: int) -> PrefillDecodingPress:
        """Holds `slots` per head on average: from one compression to the next its cache grows by `interval`."""
        target = slots - (self.interval - 1) // 2
        prompt = self.wrapped(self.prompt())
        prompt.compression_ratio = 1 - (target + 0.5) / prompt_len
        step = self.wrapped((self.step or self.prompt)())
        return PrefillDecodingPress(prompt, DecodingPress(step, self.interval, target, self.interval))

    def wrapped(self, press):
        return AdaKVPress(press) if self.is_adaptive else press


def snapkv(window: int) -> Callable:
    return lambda: kvpress.SnapKVPress(window_size=window)


TRIED = {
    "StreamingLLM": Tried(kvpress.StreamingLLMPress),
    "Knorm": Tried(kvpress.KnormPress),
    "KeyDiff": Tried(kvpress.KeyDiffPress),
    "TOVA": Tried(kvpress.TOVAPress),
    "LagKV": Tried(kvpress.LagKVPress),
    "Random": Tried(kvpress.RandomPress),
    "ObservedAttention": Tried(kvpress.ObservedAttentionPress, attention="eager"),
    "CriticalKV of KeyDiff": Tried(lambda: kvpress.CriticalKVPress(kvpress.KeyDiffPress())),
    "SnapKV, 16 queries": Tried(snapkv(64), snapkv(16), 17),
    "SnapKV, 32 queries": Tried(snapkv(64), snapkv(32), 33),
    "SnapKV, 64 queries": Tried(snapkv(64), snapkv(64), 65),
    "ExpectedAttention, every 16": Tried(kvpress.ExpectedAttentionPress, interval=16),
    "ExpectedAttention, every 32": Tried(kvpress.ExpectedAttentionPress, interval=32),
    "ExpectedAttention, every 64": Tried(kvpress.ExpectedAttentionPress, interval=64),
    "AdaKV of SnapKV, 32 queries": Tried(snapkv(64), snapkv(32), 33, is_adaptive=True),
    "AdaKV of ExpectedAttention, every 16": Tried(kvpress.ExpectedAttentionPress, interval=16, is_adaptive=True),
    "AdaKV of TOVA": Tried(kvpress.TOVAPress, is_adaptive=True),
    "AdaKV of KeyDiff": Tried(kvpress.KeyDiffPress, is_adaptive=True),
    "AdaKV of Knorm": Tried(kvpress.KnormPress, is_adaptive=True),
}


@torch.no_grad()
def score(model, ids: torch.Tensor, prompt_len: int, press) -> dict:
    """The log-probability of every token behind the prompts, fed one by one. `ids`: (texts, tokens). "slots" are those
    that a head attends to on average after the first compression, and "held" the most that are in memory."""
    cache = DynamicCache()
    found = []
    slots = []
    held = []
    with press(model) if press is not None else nullcontext():
        for begin, end in zip([0, *range(prompt_len, ids.shape[1] - 1)], range(prompt_len, ids.shape[1])):
            position = torch.arange(begin, end)
            out = model(
                ids[:, begin:end],
                past_key_values=cache,
                cache_position=position,
                position_ids=position[None].expand(len(ids), -1),
                logits_to_keep=1,
            )
            logprobs = torch.log_softmax(out.logits[:, -1].double(), -1)
            found.append(logprobs.gather(1, ids[:, end : end + 1])[:, 0])
            held.append(max(layer.keys.shape[2] for layer in cache.layers))
            slots.append(fmean(map(attended, model.model.layers, cache.layers)))
    return {"logprobs": torch.stack(found, 1).tolist(), "slots": fmean(slots), "held": max(held)}


def attended(layer, cached) -> float:
    """Slots of a layer's heads that are not masked, as AdaKV masks what it would evict."""
    masked = getattr(layer.self_attn, "masked_key_indices", None)
    texts, heads, length, _ = cached.keys.shape
    return length - (0 if masked is None else len(masked[0]) / (texts * heads))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    model_path = Path(job["model"])
    model = AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    ).eval()
    ids = torch.tensor(job["token_ids"])
    results = [{"method": "full", "budget": None} | score(model, ids, job["prompt_len"], None)]
    for name in job["presses"] or TRIED:
        tried = TRIED[name]
        model.set_attn_implementation(tried.attention)
        for slots in job["slots"]:
            for layer in model.model.layers:
                layer.self_attn.masked_key_indices = None
            press = tried.press(slots, job["prompt_len"])
            results.append({"method": name, "budget": slots} | score(model, ids, job["prompt_len"], press))
            print(name, slots, results[-1]["slots"], results[-1]["held"], flush=True)
            Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
