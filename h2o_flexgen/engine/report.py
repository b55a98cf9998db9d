"""What is measured of a job, and the report of it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.stores import Stores
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device
from h2o_flexgen.offload.transport import Transport
from h2o_flexgen.policy import TIERS

PHASES = ("prefill", "decode")


class Meter:
    """Seconds and bytes moved of each phase of a job. What is fetched ahead counts in the phase in which it came."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.moved = {phase: dict.fromkeys(transport.moved_bytes(), 0) for phase in PHASES}

    def start(self) -> None:
        self._transport.device.synchronize()
        self._since = time.perf_counter()
        self._counted = self._transport.moved_bytes()

    def stop(self, phase: str) -> None:
        """Add what was measured since `start`, or the last `stop`, to a phase."""
        since = self._since
        counted = self._counted
        self.start()
        self.seconds[phase] += self._since - since
        for link, nbytes in self._counted.items():
            self.moved[phase][link] += nbytes - counted[link]


@dataclass
class Report:
    """The measurements of a job.

    Loading is left out, as FlexGen counts it. The first token of each sequence comes from prefill: decode counts the
    others, and prefill the tokens of the prompts.
    """

    model: str
    device: str
    dtype: str
    workload: dict[str, int]  # num_prompts, prompt_len, gen_len
    policy: dict
    kv_budget: dict | None  # heavy and recent slots, and the rule's name; None for a full cache
    prefill: dict  # seconds, tokens_per_s, bytes_moved
    decode: dict
    total: dict[str, float]  # seconds, generated_tokens, tokens_per_s
    peak_memory_bytes: dict[str, int]  # by tier
    planned_memory_bytes: dict[str, int]
    bytes_moved: dict[str, int]  # by link
    stall_seconds: dict[str, float]  # that compute waited for "weights" and "cache"
    predicted: dict[str, float | str] | None = None  # by the cost model, if this machine has been measured
    weights: list[str] | None = None  # formats of the matrices, if some are quantised
    compress_weight: str | None = None  # int8 or int4, if it was asked for
    compress_cache: str | None = None
    compute: str | None = None  # of the matmuls; None: exact
    in_blocks: bool | None = None  # in int8, whether weights in 4 bits are multiplied as they are stored
    model_revision: str | None = None  # the commit of a model from the Hugging Face hub

    @classmethod
    def of(cls, stores: Stores, sequences: list[Sequence], meter: Meter) -> Report:
        model = stores.model
        job = stores.job
        device = stores.device
        work = job.workload
        rule = job.rule
        stalls = device.stall_seconds
        planned = {tier: job.plan.needed(tier) for tier in TIERS}
        generated = sum(len(s.tokens) for s in sequences)
        tokens = {"prefill": sum(work.prompt_lens), "decode": generated - sum(1 for s in sequences if s.tokens)}
        seconds = sum(meter.seconds.values())
        prefill, decode = meter.moved.values()
        phases = {
            phase: {"seconds": s, "tokens_per_s": _rate(tokens[phase], s), "bytes_moved": meter.moved[phase]}
            for phase, s in meter.seconds.items()
        }
        return cls(
            model=model.name,
            device=str(device),
            dtype=dtype_name(model.dtype),
            workload={"num_prompts": len(sequences), "prompt_len": work.longest, "gen_len": work.gen_len},
            policy=asdict(job.policy),
            kv_budget=rule.to_dict(),
            **phases,
            total={"seconds": seconds, "generated_tokens": generated, "tokens_per_s": _rate(generated, seconds)},
            peak_memory_bytes=_peak_bytes(
                device, planned["cpu"], stores.transport.disk_bytes() + model.source.copy_bytes
            ),
            planned_memory_bytes=planned,
            bytes_moved={link: prefill[link] + decode[link] for link in prefill},
            stall_seconds={
                "weights": stalls.get("weights", 0.0),
                # hidden states share a transfer queue with the cache
                "cache": stalls.get("cache", 0.0) + stalls.get("activations", 0.0),
            },
            predicted=job.prediction and job.prediction.of_job(),
            weights=sorted({form.name for form in model.formats.values()}) if model.is_quantised else None,
            compress_weight=model.compress_weight,
            compress_cache=job.compress_cache,
            compute=None if model.compute == "exact" else model.compute,
            in_blocks=model.in_blocks or None,
            model_revision=model.revision,
        )

    def to_dict(self) -> dict:
        """For JSON; some only where there is something to say."""
        optional = "predicted weights compress_weight compress_cache compute in_blocks model_revision".split()
        return {name: value for name, value in asdict(self).items() if value is not None or name not in optional}


def _peak_bytes(device: Device, cpu_pool: int, disk: int) -> dict[str, int]:
    """Without CUDA the tiers gpu and cpu are one RAM, of which `cpu_pool` bytes are the tier cpu."""
    ram = memory.peak_resident()
    if device.is_cuda:
        return {"gpu": device.peak_bytes(), "cpu": ram, "disk": disk}
    return {"gpu": max(0, ram - cpu_pool), "cpu": cpu_pool, "disk": disk}


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
