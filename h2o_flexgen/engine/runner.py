"""The engine: takes a block of prompts through the zig-zag schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from h2o_flexgen import interrupts
from h2o_flexgen.engine.sampling import SamplingParams, sample
from h2o_flexgen.engine.schedule import Step, ZigZag
from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache import CacheRule
from h2o_flexgen.models.parts import Weights
from h2o_flexgen.models.registry import family
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.activations import ActivationStore
from h2o_flexgen.offload.device import Device
from h2o_flexgen.offload.kv_store import KVStore
from h2o_flexgen.offload.weights import WeightStore
from h2o_flexgen.sizes import HEAD_ROWS, matmul_groups

#: least time between two times that prefill gives back gaps in the heap
GAPS_SECONDS = 0.25


@dataclass
class Sequence:
    """One prompt on its way: `index` is its place in the job."""

    index: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # "length", "stop" or "error"


@dataclass
class Batch:
    """Sequences whose cache of a layer moves, and is attended to, at once; and how prefill cuts them."""

    sequences: list[Sequence]
    micro: list[tuple[int, int]]  # the rows begin..end of each prefill micro-batch

    def __post_init__(self):
        self.lengths = torch.tensor([len(s.prompt) for s in self.sequences])
        self.longest = int(self.lengths.max())

    def prompt_ids(self, begin: int, end: int) -> Tensor:
        """(end - begin, T) token ids, padded on the right to the longest of these rows. A row is padded with its own
        last token: padding is masked, but 0 * NaN would spread from a token whose numbers overflow."""
        rows = [s.prompt for s in self.sequences[begin:end]]
        width = max(map(len, rows))
        return torch.tensor([row + row[-1:] * (width - len(row)) for row in rows])


def make_batches(sequences: list[Sequence], batch_size: int, prefill_tokens: int) -> list[Batch]:
    """Cut a block into batches, and those into prefill micro-batches of at most `prefill_tokens` tokens."""
    batches = []
    for at in range(0, len(sequences), batch_size):
        rows = sequences[at : at + batch_size]
        micro, begin = [], 0
        while begin < len(rows):
            count = max(1, prefill_tokens // max(len(s.prompt) for s in rows[begin:]))
            micro.append((begin, min(begin + count, len(rows))))
            begin = micro[-1][1]
        batches.append(Batch(rows, micro))
    return batches


def prompt_positions(lengths: Tensor, width: int) -> Tensor:
    """Positions (B, width) of prompts; padding has its prompt's last one, so that no length looks longer than it is."""
    return torch.minimum(torch.arange(width), lengths[:, None] - 1)


class Engine:
    """Joins weights, cache and maths. One block at a time; `seconds` adds up over blocks.

    Args:
        ram: bytes that this process may hold; above them prefill gives gaps in the heap back within a layer too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        dtype: torch.dtype,
        rule: CacheRule,
        weights: WeightStore,
        caches: KVStore,
        activations: ActivationStore,
        params: SamplingParams,
        eos_ids: frozenset[int],
        ram: float = float("inf"),
        on_progress: Callable[[int, int, int], None] = lambda i, j, tokens: None,
        on_finished: Callable[[list[Sequence]], None] = lambda sequences: None,
    ):
        self.spec, self.device, self.dtype, self.rule = spec, device, dtype, rule
        self.family = family(spec.model_type)
        self.weights, self.caches, self.activations = weights, caches, activations
        self.params, self.eos_ids, self.ram = params, eos_ids, ram
        self.on_progress, self.on_finished = on_progress, on_finished
        self.num_layers = len(weights.layers)
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self._hidden: dict[int, Tensor] = {}  # by batch, (B, 1, E), between the layers of a decode step
        self._broken = False  # whether a number that is not finite may be left in the caches
        self._streaming = [j for j in range(self.num_layers) if weights.streams(j)]

    @torch.inference_mode()
    def run(self, batches: list[Batch], is_last: bool = True) -> None:
        """Generate for all sequences of a block; they hold the result.

        Args:
            is_last: no block follows, so that no weights need be fetched at the end.
        """
        self.batches = batches
        gen_len = self.params.max_tokens
        layouts = [self.rule.layout(self.spec, self.dtype, len(b.sequences), b.longest, gen_len) for b in batches]
        self.caches.begin_block(layouts)
        self.schedule = ZigZag(self.params.max_tokens, self.num_layers, len(batches))
        decoders = range(1, self.num_layers - 1)
        self._coming = [(j, k) for j in decoders for k in range(len(batches)) if self.caches.streams(j - 1, k)]
        self._not_fetched = Step(1, 0, 0)
        self.device.synchronize()
        start = self._released = time.perf_counter()
        phase = "prefill"
        for i, j, active in self.schedule.layers():
            interrupts.check()
            if j == 0 and i == 1:
                start = self._lap(phase, start)
                phase = "decode"
            before = sum(len(s.tokens) for b in batches for s in b.sequences) if j == self.num_layers - 1 else 0
            self._prefetch_weights(i, j, is_last)
            w = self.weights.get(j)
            if i == 0:
                for k in active:
                    self._prefill(Step(i, j, k), w)
            else:
                for group in self._groups(active):
                    self._decode(i, j, group, w)
            del w
            self.weights.release(j)
            if i == 0 and (j == self.num_layers - 1 or self._gaps_are_due()):
                self._release_gaps()
            tokens = 0
            if j == self.num_layers - 1:
                tokens = sum(len(s.tokens) for b in batches for s in b.sequences) - before
            self.on_progress(i, j, tokens)
        self.caches.drain()
        self.activations.drain()
        if self._broken:
            self.caches.wipe()
            self._broken = False
        self.device.synchronize()
        self._lap(phase, start)
        if is_last:
            self.weights.drop_prefetched()

    def _lap(self, phase: str, start: float) -> float:
        self.device.synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - start
        return now

    # what to fetch while this step computes

    def _prefetch_weights(self, i: int, j: int, is_last: bool) -> None:
        if not self._streaming:
            return
        self.weights.prefetch(j)  # the next ones follow it without a pause, whatever compute waits for
        following = next((x for x in self._streaming if x > j), None)
        if following is None:
            if i + 1 == self.params.max_tokens and is_last:
                return
            following = self._streaming[0]
        if following != j:
            self.weights.prefetch(following)

    def _prefetch(self, step: Step) -> None:
        """The caches of this decode step and those that follow, while slots are free."""
        self._not_fetched = max(self._not_fetched, step)
        while (following := self.schedule.first_at(self._coming, self._not_fetched)) is not None:
            i, j, k = following
            if not self.caches.prefetch(j - 1, k, self._held(k, i)):
                return
            self._not_fetched = Step(i, j, k + 1)

    def _prefetch_hidden(self, step: Step) -> None:
        """Of prefill's next step, if they are at home already."""
        if step.k + 1 < len(self.batches):
            self.activations.prefetch(step.k + 1, 0, 0)
        elif step.j + 1 < self.num_layers:
            self.activations.prefetch(0, 0, 0)

    def _is_decoder(self, j: int) -> bool:
        return 0 < j < self.num_layers - 1

    def _held(self, k: int, i: int) -> int:
        """Slots of a batch's cache in use before token step i."""
        return self.batches[k].longest + i - 1

    # one step

    def _prefill(self, step: Step, w: Weights) -> None:
        i, j, k = step
        batch = self.batches[k]
        cache = self.caches.blank(j - 1, k) if self._is_decoder(j) else None
        if j == self.num_layers - 1:  # no cache takes a slot to be filled any more
            self._prefetch(step)
        for m, (begin, end) in enumerate(batch.micro):
            interrupts.check()
            offset = begin * batch.longest * self.spec.hidden * self.dtype.itemsize
            lengths = batch.lengths[begin:end]
            if j == 0:
                ids = batch.prompt_ids(begin, end)
                self.activations.put(k, m, offset, self._embed(ids, prompt_positions(lengths, ids.shape[1]), w))
                continue
            hidden = self.activations.get(k, m, offset)
            if m + 1 < len(batch.micro):
                after = batch.micro[m + 1][0] * batch.longest * self.spec.hidden
                self.activations.prefetch(k, m + 1, after * self.dtype.itemsize)
            else:
                self._prefetch_hidden(step)
            if cache is None:
                last = hidden[torch.arange(end - begin), lengths - 1]
                self._choose(i, w, batch.sequences[begin:end], last)
                continue
            attend = partial(self.rule.prefill, cache.rows(begin, end), lengths=lengths)
            positions = prompt_positions(lengths, hidden.shape[1])
            hidden = self.family.block(self.spec, w, hidden, positions, attend)
            self.activations.put(k, m, offset, hidden)
            if self._gaps_are_due() and memory.resident() > self.ram:  # a layer may take seconds
                self._release_gaps()
        if cache is not None:
            self.caches.store_all(j - 1, k, batch.longest)
        else:
            self._retire(step)

    def _gaps_are_due(self) -> bool:
        """Micro-batches leave gaps of several times what one of them takes; pages come back at a price."""
        return time.perf_counter() - self._released > GAPS_SECONDS

    def _release_gaps(self) -> None:
        self.device.release_gaps()
        self._released = time.perf_counter()

    def _groups(self, active: list[int]) -> list[list[int]]:
        """The batches that go through a decode step's products together."""
        sizes = [len(self.batches[k].sequences) for k in active]
        return [active[begin:end] for begin, end in matmul_groups(sizes)]

    def _decode(self, i: int, j: int, group: list[int], w: Weights) -> None:
        """A layer: products of all rows at once, attention batch by batch as their caches come."""
        self._prefetch(Step(i, j, group[0]))
        batches = [self.batches[k] for k in group]
        sizes = [len(batch.sequences) for batch in batches]
        sequences = [s for batch in batches for s in batch.sequences]

        def attend(q: Tensor, key: Tensor, v: Tensor) -> Tensor:
            parts = zip(group, q.split(sizes), key.split(sizes), v.split(sizes))
            return torch.cat([self._attend(Step(i, j, k), *part) for k, *part in parts])

        positions = (torch.cat([batch.lengths for batch in batches]) + i - 1)[:, None]
        if j == 0:
            ids = torch.tensor([s.tokens[-1] if s.tokens else 0 for s in sequences])
            hidden = self._embed(ids[:, None], positions, w)
        else:
            hidden = torch.cat([self._hidden.pop(k) for k in group])
        if j == self.num_layers - 1:
            self._choose(i, w, sequences, hidden[:, 0])
            for k in group:
                self._retire(Step(i, j, k))
            return
        if j > 0:
            hidden = self.family.block(self.spec, w, hidden, positions, attend)
        self._hidden.update(zip(group, hidden.split(sizes)))

    def _attend(self, step: Step, q: Tensor, key: Tensor, v: Tensor) -> Tensor:
        """Attention of one batch, whose cache is home again, or on its way, when this returns."""
        i, j, k = step
        interrupts.check()
        cache = self.caches.get(j - 1, k, self._held(k, i))
        # a cache that is used where it lies calls the query to it
        q, key, v = (x.to(cache.k[0].device) for x in (q, key, v))
        context, slots = self.rule.decode(cache, q, key, v, self.batches[k].lengths, i)
        self.caches.store_step(j - 1, k, self._held(k, i + 1), slots, key[:, :, 0], v[:, :, 0])
        self._prefetch(step)  # into the slot that is free now
        return context.to(self.device.torch_device)

    def _embed(self, ids: Tensor, positions: Tensor, w: Weights) -> Tensor:
        return self.family.embed(self.spec, w, self.weights.rows, ids, positions)

    def _choose(self, i: int, w: Weights, sequences: list[Sequence], hidden: Tensor) -> None:
        """Append the token of step i to every sequence that still runs. hidden: (B, E), contiguous."""
        for at in range(0, len(sequences), HEAD_ROWS):
            interrupts.check()
            rows = sequences[at : at + HEAD_ROWS]
            logits = self.family.logits(self.spec, w, hidden[at : at + HEAD_ROWS])
            tokens, logprobs = sample(logits, self.params, [s.index for s in rows], i)
            for s, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist()):
                finite = math.isfinite(logprob)
                self._broken |= not finite  # also of a sequence that has stopped: it is computed until its batch leaves
                if s.finish_reason is not None:
                    continue
                if not finite:
                    s.finish_reason = "error"
                    continue
                s.tokens.append(token)
                s.logprobs.append(logprob)
                if token in self.eos_ids and not self.params.ignore_eos:
                    s.finish_reason = "stop"
                elif len(s.tokens) == self.params.max_tokens:
                    s.finish_reason = "length"

    def explain_broken(self, whole_job: bool) -> None:
        """Every sequence of the first block has failed: raises UserError if the checkpoint is broken, or if there
        are no other sequences, whom a few bad prompts must not stop."""
        name = self.weights.find_broken()
        if name is not None:
            raise UserError(f"the weights {name!r} hold NaN or infinite numbers: the checkpoint is broken")
        if not whole_job:
            return
        if self.dtype == torch.float16:
            raise UserError("the model's numbers overflow in float16: use --dtype bfloat16 or float32")
        raise UserError("the model gives NaN for every prompt: the checkpoint is broken")

    def _retire(self, step: Step) -> None:
        """A batch whose sequences have all finished leaves the schedule."""
        if all(s.finish_reason is not None for s in self.batches[step.k].sequences):
            self.schedule.finish(step.k)
            self._coming = [piece for piece in self._coming if piece[1] != step.k]
            for layer in range(self.num_layers - 2):
                self.caches.drop(layer, step.k)
            with torch.inference_mode(False):  # the mode is the engine's, not the caller's
                self.on_finished(self.batches[step.k].sequences)
