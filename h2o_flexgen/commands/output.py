"""What commands print for humans: jobs, policies, KV budgets and memory."""

from __future__ import annotations

import os
import sys

from h2o_flexgen.errors import UserError
from h2o_flexgen.planning.budget import BudgetPoint, largest_free
from h2o_flexgen.policy import KINDS, Policy

#: traffic between tiers, as a machine without CUDA has it
RAM_LINKS = {"disk_to_cpu": "disk to RAM", "cpu_to_disk": "RAM to disk"}


def print_text(text: str, end: str = "\n") -> None:
    """Print to stdout, and flush. Raises UserError if it cannot be written."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as e:
        discard(sys.stdout)
        raise UserError(f"cannot write to stdout: {e.strerror}") from None


def discard(stream) -> None:
    """Send what is buffered to nowhere: writing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def name_at(model: str, revision: str | None) -> str:
    """A model and its commit on the hub."""
    return f"{model} (revision {revision[:12]})" if revision else model


def describe_job(
    model: str,
    dtype: str,
    machine: str,
    workload: dict,
    policy: str,
    kv_budget: dict | None,
    compress_cache: str | None = None,
) -> str:
    """What a job does. `workload`: num_prompts, prompt_len and gen_len; `policy`: by `describe_policy`; `kv_budget`:
    slots, "heavy" and "recent", and "rule", or None for a full cache."""
    prompts = f"{workload['num_prompts']} prompts of up to {workload['prompt_len']} tokens"
    cache = describe_budget(kv_budget) + (f", in {compress_cache}" if compress_cache else "")
    return (
        f"model      {model}, {dtype} on {machine}\n"
        f"workload   {prompts}, {workload['gen_len']} tokens each\n"
        f"policy     {policy}\n"
        f"KV cache   {cache}"
    )


def describe_policy(policy: Policy, cuda: bool) -> str:
    """A policy for humans; without CUDA it names only RAM and disk."""
    placed = f"percent {' '.join(f'{x:g}' for x in policy.percent)}" if cuda else describe_ram(policy)
    text = f"{policy.gpu_batch_size} x {policy.num_gpu_batches}, {placed}, overlap {'on' if policy.overlap else 'off'}"
    if policy.cpu_cache_compute:
        text += ", attention on the CPU"
    if policy.prefill_tokens != Policy.prefill_tokens:
        text += f", prefill by {policy.prefill_tokens} tokens"
    return text


def describe_ram(policy: Policy) -> str:
    """What a policy has in RAM on a machine without CUDA; the rest is on disk."""
    shares = {kind: policy.percent[2 * n] + policy.percent[2 * n + 1] for n, kind in enumerate(KINDS)}
    if min(shares.values()) == 100:
        return "all in RAM"
    return "in RAM " + ", ".join(f"{share:g} % of {kind}" for kind, share in shares.items())


def by_memory(nbytes: dict[str, int], cuda: bool) -> dict[str, int]:
    """Bytes by tier; without CUDA by RAM, which is the tiers gpu and cpu together, and disk."""
    return nbytes if cuda else {"RAM": nbytes["gpu"] + nbytes["cpu"], "disk": nbytes["disk"]}


def by_link(nbytes: dict[str, int], cuda: bool) -> dict[str, int]:
    """Bytes moved, by link; without CUDA all copies within RAM are one."""
    if cuda:
        return {link.replace("_", " "): moved for link, moved in nbytes.items()}
    found = {name: nbytes[link] for link, name in RAM_LINKS.items()}
    return found | {"within RAM": sum(moved for link, moved in nbytes.items() if link not in RAM_LINKS)}


def describe_budget(kv_budget: dict | None) -> str:
    """A KV budget as reports have it; None for a full cache."""
    if kv_budget is None:
        return "full"
    rolling = ", positions roll" if kv_budget.get("position_rolling") else ""
    slots = f"{kv_budget['heavy']} heavy + {kv_budget['recent']} recent slots"
    share = " on average, by head" if "layers" in kv_budget else ""
    return f"{slots}{share} ({kv_budget['rule']}){rolling}"


def describe_curve(curve: list[BudgetPoint]) -> str:
    """A table: formats of weights and cache where they differ, KV budget, block, tokens per second, gain over the
    largest budget in the formats with most bits, and the loss where one is known. An arrow marks the choice of
    `largest_free`."""
    chosen = largest_free(curve)
    formats = [(point.compress_weight, point.compress_cache) for point in curve]
    dearest = [point for point, each in zip(curve, formats) if each == formats[0]][-1]
    has_losses = any(point.loss is not None for point in curve)
    has_weights, has_caches = (len(set(each)) > 1 for each in zip(*formats))
    head = "  weights" * has_weights + "   cache" * has_caches
    lines = [f"  {head} hh-ratio  slots       block  tokens/s    gain" + "      loss" * has_losses]
    for point in curve:
        mark = "=>" if point == chosen else "  "
        ratio = "full" if point.ratio is None else f"{point.ratio:g}"
        block = f"{point.gpu_batch_size} x {point.num_gpu_batches}"
        loss = "unknown" if point.loss is None else f"{point.loss:+.1%}"
        form = f"{point.compress_weight or 'stored':>9}" * has_weights
        form += f"{point.compress_cache or 'floats':>8}" * has_caches
        gain = f"{point.tokens_per_s / dearest.tokens_per_s:.2f}x"
        lines.append(f"{mark}{form}{ratio:>9}{point.slots:>7}{block:>12}{point.tokens_per_s:>10.2f}{gain:>8}")
        lines[-1] += f"{loss:>10}" * has_losses
    return "\n".join(lines)
