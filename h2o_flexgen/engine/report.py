"""The measurements of a job, and its report."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from h2o_flexgen.engine.batch import Chunk
from h2o_flexgen.engine.scheduler import Pass
from h2o_flexgen.engine.stores import Stores
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.machine import memory
from h2o_flexgen.machine.device import Device
from h2o_flexgen.policy import TIERS
from h2o_flexgen.storage.transport import Transport

PHASES = ("prefill", "decode")


class Meter:
    """Seconds and bytes moved of each phase of a job.

    Where some rows prefill while others decode, their chunks are timed; the time of a chunk that has both is split by
    tokens. Waits, all other time and bytes are split in proportion.

    Attributes:
        passes: so far.
        computed_tokens: of prompts.
        shared_tokens: of prompts, which were computed with another one's.
        row_steps: decode steps of rows.
        lengths: output tokens of each row that has ended, in the order in which they began.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._device = transport.device
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.moved = {phase: dict.fromkeys(transport.moved_bytes(), 0.0) for phase in PHASES}
        self.passes = 0
        self.computed_tokens = 0
        self.shared_tokens = 0
        self.row_steps = 0
        self.prompt_tokens = 0
        self.lengths = array("i")
        self._chunks: list[tuple] = []  # (prompt share, begin, end)
        self._prefill = 1.0  # the fraction of the last pass that was prefill

    def start(self) -> None:
        self._since = self._device.mark()
        self._counted = self._transport.moved_bytes()

    @contextmanager
    def chunk(self, chunk: Chunk) -> Iterator[None]:
        """Time a chunk in one stage."""
        begin = self._device.mark()
        yield
        self._chunks.append((chunk.prompt_share, begin, self._device.mark()))

    def end_pass(self, pass_: Pass) -> None:
        self.passes += 1
        for piece in pass_.pieces:
            if not piece.is_prompt:
                self.row_steps += piece.size
                continue
            self.computed_tokens += piece.size
            self.shared_tokens += piece.shared * len(piece.places)
            for s in piece.rows if piece.places else ():
                s.rank = len(self.lengths)
                self.lengths.append(0)
                self.prompt_tokens += len(s.prompt)
        for s in pass_.rows:
            if s.finish_reason is not None:
                self.lengths[s.rank] = len(s.tokens)
        self.stop()

    def stop(self) -> None:
        """Add up what was measured since the last pass began."""
        spans = [(part, self._device.seconds_between(begin, end)) for part, begin, end in self._chunks]
        self._chunks.clear()
        since = self._since
        counted = self._counted
        self.start()
        total = self._device.seconds_between(since, self._since)
        timed = sum(seconds for _, seconds in spans)
        self._prefill = sum(part * seconds for part, seconds in spans) / timed if timed else self._prefill
        for phase, part in zip(PHASES, (self._prefill, 1 - self._prefill)):
            self.seconds[phase] += part * total
            for link, nbytes in self._counted.items():
                self.moved[phase][link] += part * (nbytes - counted[link])


@dataclass
class Report:
    """The measurements of a job.

    Loading is left out, as in FlexGen. Prefill counts the tokens of the prompts; decode counts generated tokens but the
    first one of each sequence, which comes from prefill.
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
    computed_tokens: int  # of prompts
    shared_tokens: int  # of prompts, which were computed with another one's
    row_steps: int  # decode steps of rows
    stall_seconds: dict[str, float]  # that compute waited for "weights" and "cache"
    predicted: dict[str, float | str] | None = None  # by the cost model, if this machine has been measured
    weights: list[str] | None = None  # formats of the matrices, if some are quantised
    compress_weight: str | None = None  # int8 or int4, if given
    compress_cache: str | None = None
    compute: str | None = None  # of the matmuls; None: exact
    in_blocks: bool | None = None  # whether int8 matmuls read 4-bit weights as stored
    model_revision: str | None = None  # the commit of a model from the Hugging Face hub

    @classmethod
    def of(cls, stores: Stores, meter: Meter) -> Report:
        model = stores.model
        job = stores.job
        device = stores.device
        work = job.workload
        rule = job.rule
        stalls = device.stall_seconds
        planned = {tier: job.plan.needed(tier) for tier in TIERS}
        generated = sum(meter.lengths)
        tokens = {"prefill": meter.prompt_tokens, "decode": meter.row_steps}
        seconds = sum(meter.seconds.values())
        moved = {phase: _rounded(links) for phase, links in meter.moved.items()}
        prefill, decode = moved.values()
        phases = {
            phase: {"seconds": s, "tokens_per_s": _rate(tokens[phase], s), "bytes_moved": moved[phase]}
            for phase, s in meter.seconds.items()
        }
        return cls(
            model=model.name,
            device=str(device),
            dtype=dtype_name(model.dtype),
            workload={"num_prompts": len(meter.lengths), "prompt_len": work.longest, "gen_len": work.gen_len},
            policy=asdict(job.policy),
            kv_budget=rule.to_dict(),
            **phases,
            total={"seconds": seconds, "generated_tokens": generated, "tokens_per_s": _rate(generated, seconds)},
            peak_memory_bytes=_peak_bytes(
                device, planned["cpu"], stores.transport.disk_bytes() + model.source.copy_bytes
            ),
            planned_memory_bytes=planned,
            bytes_moved={link: prefill[link] + decode[link] for link in prefill},
            computed_tokens=meter.computed_tokens,
            shared_tokens=meter.shared_tokens,
            row_steps=meter.row_steps,
            stall_seconds={
                "weights": stalls.get("weights", 0.0),
                # hidden states use the transfer queue of the cache
                "cache": stalls.get("cache", 0.0) + stalls.get("activations", 0.0),
            },
            predicted=job.predict and job.predict(meter.lengths).of_job(),
            weights=sorted({form.name for form in model.formats.values()}) if model.is_quantised else None,
            compress_weight=model.compress_weight,
            compress_cache=job.compress_cache,
            compute=None if model.compute == "exact" else model.compute,
            in_blocks=model.in_blocks or None,
            model_revision=model.revision,
        )

    def to_dict(self) -> dict:
        """As plain data for JSON, without optional fields that are None."""
        optional = "predicted weights compress_weight compress_cache compute in_blocks model_revision".split()
        return {name: value for name, value in asdict(self).items() if value is not None or name not in optional}


def _peak_bytes(device: Device, cpu_pool: int, disk: int) -> dict[str, int]:
    """Peak bytes by tier. Without CUDA the tiers gpu and cpu share the RAM, of which `cpu_pool` bytes are the cpu's."""
    ram = memory.peak_resident()
    if device.is_cuda:
        return {"gpu": device.peak_bytes(), "cpu": ram, "disk": disk}
    return {"gpu": max(0, ram - cpu_pool), "cpu": cpu_pool, "disk": disk}


def _rounded(moved: dict[str, float]) -> dict[str, int]:
    return {link: round(nbytes) for link, nbytes in moved.items()}


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
