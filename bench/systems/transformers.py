"""Plain transformers with all weights on the device. On a CPU the file is mapped, and under a cap the kernel pages it.

Options: "attention", transformers' implementation ("sdpa" or "eager"); "dtype", instead of the row's.
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
    if path.is_file():  # a GGUF file, which transformers dequantises
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **kwargs).eval()
    return AutoModelForCausalLM.from_pretrained(path, **kwargs).eval()


def generate(model, job: Job, context) -> dict:
    """Seconds of prefill and decode of a job, after a warm-up of two tokens (files, traces, kernels)."""
    prompts = random_prompts(job.batch, job.prompt_len)
    # given a slice of the hidden states, torch would copy the vocabulary's matrix for every sequence
    model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))
    with context():
        # on a GPU another batch size would use other kernels and leave the memory to be allocated
        time_generate(model, prompts[:1] if job.device == "cpu" else prompts, 2, job.device)
        return time_generate(model, prompts, job.gen_len, job.device)


def time_generate(model, prompts: list[list[int]], gen_len: int, device: str = "cpu") -> dict[str, float]:
    """Seconds of prefill and of all decode steps in transformers' `generate`."""
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
