"""What is measured of a job, and the report of it."""

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

    Where rows prefill while others decode, their chunks are timed, and one that has both counts by its tokens. Waits
    and all else are divided in proportion, and so are bytes.

    Attributes:
        passes: so far.
        computed_tokens: of prompts; shared_tokens: those of rows that others had computed.
        row_steps: tokens that rows were taken through one at a time.
        lengths: tokens of the outputs of rows that have ended, in the order in which they began.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._device = transport.device
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.moved = {phase: dict.fromkeys(transport.moved_bytes(), 0.0) for phase in PHASES}
        self.passes = 0
        self.computed_tokens = self.shared_tokens = self.row_steps = 0
        self.prompt_tokens = 0
        self.lengths = array("i")
        self._chunks: list[tuple] = []  # (part of it that is prompts, begin, end)
        self._prefill = 1.0  # the part of the last pass that was prefill

    def start(self) -> None:
        self._since = self._device.mark()
        self._counted = self._transport.moved_bytes()

    @contextmanager
    def chunk(self, chunk: Chunk) -> Iterator[None]:
        """Inside, the chunk is taken through a layer."""
        begin = self._device.mark()
        yield
        self._chunks.append((chunk.prompt_share, begin, self._device.mark()))

    def end_pass(self, pass_: Pass) -> None:
        self.passes += 1
        for piece in (piece for chunk in pass_.chunks for piece in chunk.pieces):
            if piece.is_prompt:
                self.computed_tokens += piece.size
                self.shared_tokens += piece.shared * len(piece.places)
            else:
                self.row_steps += piece.size
            if piece.is_prompt and piece.places:
                for s in piece.rows:
                    s.rank = len(self.lengths)
                    self.lengths.append(0)
                self.prompt_tokens += sum(len(s.prompt) for s in piece.rows)
        for s in pass_.rows:
            if s.finish_reason is not None:
                self.lengths[s.rank] = len(s.tokens)
        self.stop()

    def stop(self) -> None:
        """Count what was measured since the last pass began."""
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
    computed_tokens: int  # of prompts
    shared_tokens: int  # of prompts, which were computed with another one's
    row_steps: int  # decode steps of rows
    stall_seconds: dict[str, float]  # that compute waited for "weights" and "cache"
    predicted: dict[str, float | str] | None = None  # by the cost model, if this machine has been measured
    weights: list[str] | None = None  # formats of the matrices, if some are quantised
    compress_weight: str | None = None  # int8 or int4, if it was asked for
    compress_cache: str | None = None
    compute: str | None = None  # of the matmuls; None: exact
    in_blocks: bool | None = None  # in int8, whether weights in 4 bits are multiplied as they are stored
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
                # hidden states share a transfer queue with the cache
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
        """For JSON; some only where there is something to say."""
        optional = "predicted weights compress_weight compress_cache compute in_blocks model_revision".split()
        return {name: value for name, value in asdict(self).items() if value is not None or name not in optional}


def _peak_bytes(device: Device, cpu_pool: int, disk: int) -> dict[str, int]:
    """Without CUDA the tiers gpu and cpu are one RAM, of which `cpu_pool` bytes are the tier cpu."""
    ram = memory.peak_resident()
    if device.is_cuda:
        return {"gpu": device.peak_bytes(), "cpu": ram, "disk": disk}
    return {"gpu": max(0, ram - cpu_pool), "cpu": cpu_pool, "disk": disk}


def _rounded(moved: dict[str, float]) -> dict[str, int]:
    return {link: round(nbytes) for link, nbytes in moved.items()}


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
