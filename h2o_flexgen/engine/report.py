"""What is measured of a job, and the report of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.stores import Job
from h2o_flexgen.kernels.linear import dtype_name
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device

PHASES = ("prefill", "decode")


class Meter:
    """Seconds and bytes moved of each phase of a job. What is fetched ahead counts in the phase in which it came.

    Args:
        count: gives the bytes moved so far between tiers, by link.
    """

    def __init__(self, count: Callable[[], dict[str, int]]):
        self._count, self._counted, self._since = count, count(), time.perf_counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.moved = {phase: dict.fromkeys(self._counted, 0) for phase in PHASES}

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self, phase: str) -> None:
        """Add what was measured since `start`, or the last `stop`, to a phase."""
        now, counted = time.perf_counter(), self._count()
        self.seconds[phase] += now - self._since
        for link, nbytes in counted.items():
            self.moved[phase][link] += nbytes - self._counted[link]
        self._since, self._counted = now, counted


def make_report(
    model: LoadedModel, job: Job, sequences: list[Sequence], meter: Meter, device: Device, disk_bytes: int
) -> dict:
    """The measurements of a job, as plain data for JSON; "predicted" only if there is a prediction.

    Loading is left out, as FlexGen counts it. The first token of each sequence comes from prefill: decode counts the
    others, and prefill the tokens of the prompts.
    """
    work, rule, stalls = job.workload, job.rule, device.stall_seconds
    generated = sum(len(s.tokens) for s in sequences)
    tokens = {"prefill": sum(work.prompt_lens), "decode": generated - sum(1 for s in sequences if s.tokens)}
    seconds, (prefill, decode) = sum(meter.seconds.values()), meter.moved.values()
    report = {
        "model": model.name,
        "device": str(device),
        "dtype": dtype_name(model.dtype),
        "workload": {"num_prompts": len(sequences), "prompt_len": work.longest, "gen_len": work.gen_len},
        "policy": asdict(job.policy),
        "kv_budget": None if rule.budget is None else {"heavy": rule.heavy, "recent": rule.recent},
    }
    for phase, took in meter.seconds.items():
        speed = _rate(tokens[phase], took)
        report[phase] = {"seconds": took, "tokens_per_s": speed, "bytes_moved": meter.moved[phase]}
    report |= {
        "total": {"seconds": seconds, "generated_tokens": generated, "tokens_per_s": _rate(generated, seconds)},
        "peak_memory_bytes": _peak_bytes(device, job.planned["cpu"], disk_bytes),
        "planned_memory_bytes": job.planned,
        "bytes_moved": {link: prefill[link] + decode[link] for link in prefill},
        "stall_seconds": {
            "weights": stalls.get("weights", 0.0),
            # hidden states share a transfer queue with the cache
            "cache": stalls.get("cache", 0.0) + stalls.get("activations", 0.0),
        },
    }
    return report if job.predicted is None else report | {"predicted": job.predicted}


def _peak_bytes(device: Device, cpu_pool: int, disk: int) -> dict[str, int]:
    """Without CUDA the tiers gpu and cpu are one RAM, of which `cpu_pool` bytes are the tier cpu."""
    ram = memory.peak_resident()
    if device.is_cuda:
        return {"gpu": device.peak_bytes(), "cpu": ram, "disk": disk}
    return {"gpu": max(0, ram - cpu_pool), "cpu": cpu_pool, "disk": disk}


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
