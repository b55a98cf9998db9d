"""The measurements of a job, and its report."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import NamedTuple

from h2o_flexgen.engine.batch import Chunk
from h2o_flexgen.engine.scheduler import Pass
from h2o_flexgen.engine.stores import Part, Stores
from h2o_flexgen.formats import Blocks, dtype_name
from h2o_flexgen.machine import memory
from h2o_flexgen.machine.device import Device
from h2o_flexgen.policy import TIERS
from h2o_flexgen.storage.transport import Transport

PHASES = ("prefill", "decode")


class TimedChunk(NamedTuple):
    """A chunk in one stage, between two marks of its device."""

    prompt_share: float
    device: Device
    begin: object
    end: object

    def seconds(self) -> float:
        return self.device.seconds_between(self.begin, self.end)


class Meter:
    """Seconds and bytes moved of each phase of a job.

    Where some rows prefill while others decode, their chunks are timed; the time of a chunk that has both is split by
    tokens. Waits, all other time and bytes are split in proportion.

    Args:
        transport: of the device with the head, where a pass ends.

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
        self.prompts = 0  # some have several answers
        self.lengths = array("i")
        self._chunks: list[TimedChunk] = []
        self._prefill = 1.0  # the fraction of the last pass that was prefill

    @property
    def shared_fraction(self) -> float:
        """Of the prompts' tokens, those that were not computed."""
        return 1 - self.computed_tokens / max(1, self.prompt_tokens)

    def start(self) -> None:
        self._since = self._device.mark()
        self._counted = self._transport.moved_bytes()

    @contextmanager
    def chunk(self, chunk: Chunk, device: Device) -> Iterator[None]:
        """Time a chunk in one stage on a device."""
        begin = device.mark()
        yield
        self._chunks.append(TimedChunk(chunk.prompt_share, device, begin, device.mark()))

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
                self.prompts += s.answer == 0
        for s in pass_.rows:
            if s.finish_reason is not None:
                self.lengths[s.rank] = len(s.logprobs)
        self.stop()

    def stop(self) -> None:
        """Add up what was measured since the last pass began."""
        spans = [(chunk.prompt_share, chunk.seconds()) for chunk in self._chunks]
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


def report_of(stores: Stores, meter: Meter) -> dict:
    """The measurements of a job, as plain data.

    Loading is left out, as in FlexGen. Prefill counts the tokens of the prompts; decode counts generated tokens but the
    first one of each sequence, which comes from prefill.
    """
    model = stores.model
    job = stores.job
    planned = {tier: job.plan.needed(tier) for tier in TIERS}
    disk = stores.parts[0].transport.disk_bytes() + model.source.copy_bytes
    prompts = {"num_prompts": meter.prompts, "prompt_len": job.workload.longest, "gen_len": job.workload.gen_len}
    stalls = sum((Counter(part.device.stall_seconds) for part in stores.parts), Counter())
    phases = _phases(meter)
    prefill, decode = (phases[phase]["bytes_moved"] for phase in PHASES)
    return {
        "model": model.name,
        "device": stores.device,
        "dtype": dtype_name(model.dtype),
        "workload": prompts,
        "policy": asdict(job.policy),
        "kv_budget": job.rule.to_dict(),  # None: a full cache
        **phases,
        "peak_memory_bytes": _peak_bytes(stores.parts, planned["cpu"], disk),
        "planned_memory_bytes": planned,
        "bytes_moved": {link: prefill[link] + decode[link] for link in prefill},
        "computed_tokens": meter.computed_tokens,
        "shared_tokens": meter.shared_tokens,
        "row_steps": meter.row_steps,
        "stall_seconds": {
            "weights": float(stalls["weights"]),
            # hidden states use the transfer queue of the cache
            "cache": float(stalls["cache"] + stalls["activations"]),
        },
    } | {name: value for name, value in _optional(stores, meter).items() if value is not None}


def _phases(meter: Meter) -> dict[str, dict]:
    """Prefill, decode and total."""
    tokens = {"prefill": meter.prompt_tokens, "decode": meter.row_steps}
    phases = {}
    for phase, seconds in meter.seconds.items():
        moved = {link: round(nbytes) for link, nbytes in meter.moved[phase].items()}
        phases[phase] = {"seconds": seconds, "tokens_per_s": _rate(tokens[phase], seconds), "bytes_moved": moved}
    generated = sum(meter.lengths)
    seconds = sum(meter.seconds.values())
    total = {"seconds": seconds, "generated_tokens": generated, "tokens_per_s": _rate(generated, seconds)}
    return phases | {"total": total}


def _optional(stores: Stores, meter: Meter) -> dict:
    """Fields that are left out where they are None."""
    model = stores.model
    job = stores.job
    return {
        "devices": [found | _peak(part.device) for found, part in zip(job.devices(), stores.parts)] or None,
        "predicted": job.predict and job.predict(_passes(meter), meter.shared_fraction).of_job(),
        "weights": sorted({form.name for form in model.formats.values()}) if model.is_quantised else None,
        "compress_weight": model.compress_weight,
        "compress_cache": job.compress_cache,
        "compute": None if model.compute == "exact" else model.compute,
        "in_blocks": any(isinstance(form.operand, Blocks) for form in job.forms.values()) or None,
        "model_revision": model.revision,
    }


def _peak(device: Device) -> dict[str, int]:
    """The peak of one of several devices; pools in RAM cannot be told apart."""
    return {"peak_bytes": device.peak_bytes()} if device.is_cuda else {}


def _passes(meter: Meter) -> array:
    """Of each row, in the order in which they began; one that generates nothing takes one."""
    return array("i", (max(1, length) for length in meter.lengths))


def _peak_bytes(parts: list[Part], cpu_pool: int, disk: int) -> dict[str, int]:
    """Peak bytes by tier. Without CUDA the tiers gpu and cpu share the RAM; `cpu_pool` bytes of it are the cpu tier."""
    ram = memory.peak_resident()
    if parts[0].device.is_cuda:
        return {"gpu": sum(part.device.peak_bytes() for part in parts), "cpu": ram, "disk": disk}
    return {"gpu": max(0, ram - cpu_pool), "cpu": cpu_pool, "disk": disk}


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
