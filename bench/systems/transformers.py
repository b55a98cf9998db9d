"""Plain transformers, all weights on the device. On a CPU they are a mapped file, which the kernel pages under a cap.

Options: "attention", transformers' implementation ("sdpa" or "eager"); "dtype", another than the row's.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.common import random_prompts
from bench.job import Job

PACKAGE = "transformers"


def run(job: Job) -> dict:
    import torch

    model = load(job).to(job.device)
    tier = "GPU" if job.device != "cpu" else "RAM" if job.fits_in_ram else "disk"
    return generate(model, job, torch.inference_mode) | {"lowest_tier": tier}


def load(job: Job, **kwargs):
    import torch
    from transformers import AutoModelForCausalLM

    kwargs |= {"dtype": getattr(torch, job.options.get("dtype", job.dtype))}
    kwargs |= {"attn_implementation": job.options.get("attention", "sdpa")}
    path = Path(job.model)
    if path.is_file():  # a GGUF file, which it dequantises
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **kwargs).eval()
    return AutoModelForCausalLM.from_pretrained(path, **kwargs).eval()


def generate(model, job: Job, context) -> dict:
    """Seconds of prefill and decode of a job, after two tokens of one sequence to warm up (files, traces, kernels)."""
    prompts = random_prompts(job.batch, job.prompt_len)
    # of a slice of the hidden states, torch would copy the vocabulary's matrix once for every sequence
    model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))
    with context():
        # on a GPU a batch of another size has other kernels, and its memory is not asked for yet
        time_generate(model, prompts[:1] if job.device == "cpu" else prompts, 2, job.device)
        return time_generate(model, prompts, job.gen_len, job.device)


def time_generate(model, prompts: list[list[int]], gen_len: int, device: str = "cpu") -> dict[str, float]:
    """Seconds of prefill and of the decode steps of transformers' `generate`."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        def __init__(self):
            self.times = []

        def __call__(self, input_ids, scores, **kwargs):
            if device != "cpu":
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    clock = Clock()
    ids = torch.tensor(prompts, device=device)
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=gen_len,
        min_new_tokens=gen_len,
        do_sample=False,
        pad_token_id=1,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    assert out.shape == (len(prompts), len(prompts[0]) + gen_len)
    return {"prefill": clock.times[0] - start, "decode": clock.times[-1] - clock.times[0]}
