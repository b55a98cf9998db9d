"""A block of sequences in the zig-zag schedule: prefill by micro-batches, decode steps by groups of batches."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from h2o_flexgen import interrupts
from h2o_flexgen.engine.batch import Batch, Sequence
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.report import Meter
from h2o_flexgen.engine.schedule import Step, ZigZag
from h2o_flexgen.engine.stores import Prefetcher, Stores
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import CacheRule
from h2o_flexgen.models.parts import Attend, Weights
from h2o_flexgen.models.registry import family
from h2o_flexgen.models.rope import Positions
from h2o_flexgen.offload import memory
from h2o_flexgen.sizes import HEAD_ROWS, matmul_groups

#: prefill gives gaps in the heap back where the process holds more than this multiple of the plan, and at most once in
#: this many seconds
GAPS_OVER_PLAN, GAPS_SECONDS = 1.0, 0.25


class LogitsSink(Protocol):
    """What becomes of a step's logits: a `Sampler` makes tokens of them, `TeacherForcing` scores a text.

    Attributes:
        every_position: prefill gives the logits behind every token of a prompt, one after the other.
    """

    every_position: bool

    def take(self, i: int, sequences: list[Sequence], logits: Tensor) -> None:
        """Take the logits (B, V) of token step i, one row for each of B sequences.

        Append to each sequence that still runs the token that is the input of its next step, and set `finish_reason`
        where a sequence ends.
        """


class BlockRun:
    """One block of sequences on its way through the model. Layer 0 is the embedding, the last one the head, those
    between transformer blocks.

    Args:
        batches: by their place in the policy's block; their sequences hold the result.
        gen_len: token steps, the prefill included.
        sink: gets the logits.
        is_last: no block follows, so that no weights need be fetched at the end.
    """

    def __init__(
        self,
        stores: Stores,
        batches: dict[int, Batch],
        gen_len: int,
        sink: LogitsSink,
        observer: Observer,
        is_last: bool,
    ):
        self.spec, self.job, self.device = stores.model.spec, stores.job, stores.device
        self.weights, self.caches, self.activations = stores.weights, stores.caches, stores.activations
        self.rules = stores.rules
        self.sink, self.observer = sink, observer
        self.family = family(self.spec.model_type)
        self.token_bytes = self.spec.hidden * stores.model.dtype.itemsize
        self.batches, self.last = batches, len(stores.model.layers) - 1
        self.schedule = ZigZag(gen_len, self.last + 1, batches)
        self.prefetch = Prefetcher(stores, self.schedule, batches, is_last)
        self._gaps_released = time.perf_counter()
        self._hidden: dict[int, Tensor] = {}  # by batch, (B, 1, E): decode's hidden states stay on the device

    def run(self, meter: Meter) -> None:
        """Prefill and decode."""
        meter.start()
        for i, j, active in self.schedule.layers():
            interrupts.check()
            if (i, j) == (1, 0):
                meter.stop("prefill")
            self._run_layer(i, j, active)
            self.observer.on_progress(i, j, active)
        self.caches.drain()
        meter.stop("prefill" if i == 0 else "decode")

    def _run_layer(self, i: int, j: int, active: list[int]) -> None:
        self.prefetch.weights(i, j)
        if i > 0 and j == 0:
            self.batches.update({k: self.batches[k].running() for k in active})
        w = self.weights.get(j)
        for group in [[k] for k in active] if i == 0 else self._groups(active):
            if i == 0:
                self._prefill(j, *group, w)
            else:
                self._decode(i, j, group, w)
            if j == self.last:
                self._retire(group)
        self.weights.release(j)
        if (i, j) == (0, self.last):
            self.device.release_gaps()

    def _retire(self, group: list[int]) -> None:
        """Batches whose sequences have all finished leave the schedule."""
        for k in group:
            sequences = self.batches[k].sequences
            if all(s.finish_reason is not None for s in sequences):
                self.prefetch.finish(k)
                self.observer.on_finished(sequences)

    # prefill

    @torch.inference_mode()
    def _prefill(self, j: int, k: int, w: Weights) -> None:
        """Layer j of batch k, micro-batch by micro-batch."""
        batch, cache = self.batches[k], None
        if 0 < j < self.last:
            cache = self._cache_of_prompts(j, k)
        if j == self.last:  # prefill needs no staging buffer of the cache any more
            self.prefetch.caches(Step(0, j, k))
        for m, (begin, end) in enumerate(batch.micro):
            interrupts.check()
            positions = batch.positions(begin, end)
            if j == 0:
                hidden = self._embed(batch.prompt_ids(begin, end), positions, w)
            else:
                hidden = self.activations.get(k, m)
                self.prefetch.hidden(j, k, m)
            if j == self.last:
                self._prompt_logits(w, batch.sequences[begin:end], hidden)
                continue
            if j > 0:
                attend = partial(self._attend_prompts, self.rules[j - 1], cache, batch, begin, end)
                hidden = self._block(w, hidden, positions, attend)
            self.activations.put(k, m, begin * batch.longest * self.token_bytes, hidden)
            self._release_gaps()
        if cache is not None:
            self.caches.store_all(j - 1, k, self.prefetch.held(j, k, 1))
        if batch.is_stream:  # a staging buffer is free now
            self.prefetch.caches(Step(0, j, k))

    def _cache_of_prompts(self, j: int, k: int) -> KVTensors | None:
        """The KV block that prompts fill: a new one, or of streams the old one. None where nothing will be decoded."""
        if self.batches[k].is_stream:
            self.prefetch.caches(Step(0, j, k))
            return self.caches.get(j - 1, k, self.prefetch.held(j, k, 0))
        return self.caches.blank(j - 1, k) if self.job.workload.gen_len > 1 else None

    def _attend_prompts(
        self,
        rule: CacheRule,
        cache: KVTensors | None,
        batch: Batch,
        begin: int,
        end: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Attention of a micro-batch, which fills its part of the cache."""
        prefill, lengths = rule.prefill, batch.lengths[begin:end]
        if cache is None:
            return prefill(None, q, k, v, lengths)
        with cache.rows(batch.rows[begin:end]) as few:
            if not batch.is_stream:
                return prefill(few, q, k, v, lengths)
            q, k, v = (x.to(few.k[0].device) for x in (q, k, v))  # as in a decode step
            return prefill(few, q, k, v, lengths, batch.past(begin, end)).to(self.device.torch_device)

    def _block(self, w: Weights, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """A transformer block. Where positions roll, attention rotates: what is cached must not be."""
        B, T = positions.shape

        def attend_flat(*qkv: Tensor) -> Tensor:
            return attend(*(x.unflatten(0, (B, T)).transpose(1, 2) for x in qkv)).transpose(1, 2).flatten(0, 1)

        at = None if self.job.rule.rope else _flat(positions)
        return self.family.block(self.spec, w, hidden.flatten(0, 1), at, attend_flat).unflatten(0, (B, T))

    def _prompt_logits(self, w: Weights, sequences: list[Sequence], hidden: Tensor) -> None:
        """hidden: (B, T, E) of these prompts."""
        ends = [len(s.prompt) - 1 for s in sequences]
        if self.sink.every_position:
            places = [(row, t) for row, end in enumerate(ends) for t in range(end + 1)]
        else:
            places = list(enumerate(ends))
        rows, columns = (torch.tensor(each) for each in zip(*places))
        self._logits(0, w, [sequences[row] for row, _ in places], hidden[rows, columns])

    def _release_gaps(self) -> None:
        """Micro-batches leave gaps in the heap, several times as large as one of them. Giving the pages back and taking
        new ones costs up to a sixth of prefill, so it is done only where it must be."""
        is_due = time.perf_counter() - self._gaps_released > GAPS_SECONDS
        if is_due and memory.resident() > GAPS_OVER_PLAN * self.job.plan.needed("ram"):
            self.device.release_gaps()
            self._gaps_released = time.perf_counter()

    # decode

    def _groups(self, active: list[int]) -> list[list[int]]:
        """The batches that go through the matmuls of a decode step together."""
        sizes = [len(self.batches[k].sequences) for k in active]
        return [active[begin:end] for begin, end in matmul_groups(sizes)]

    @torch.inference_mode()
    def _decode(self, i: int, j: int, group: list[int], w: Weights) -> None:
        """One layer of one token step: matmuls of all rows at once, attention batch by batch as KV blocks arrive."""
        self.prefetch.caches(Step(i, j, group[0]))
        batches = [self.batches[k] for k in group]
        sizes = [len(batch.sequences) for batch in batches]
        sequences = [s for batch in batches for s in batch.sequences]

        def attend(q: Tensor, key: Tensor, v: Tensor) -> Tensor:
            parts = zip(group, q.split(sizes), key.split(sizes), v.split(sizes))
            return torch.cat([self._attend(Step(i, j, k), *part) for k, *part in parts])

        positions = torch.cat([batch.ends for batch in batches]) + i - 1
        positions = positions.clamp(max=self.spec.positions - 1)[:, None]  # one that has ended may run past them
        if j == 0:
            ids = torch.tensor([s.tokens[-1] if s.tokens else 0 for s in sequences])
            hidden = self._embed(ids[:, None], positions, w)
        else:
            hidden = torch.cat([self._hidden.pop(k) for k in group])
        if j == self.last:
            self._logits(i, w, sequences, hidden[:, 0])
            return
        if j > 0:
            hidden = self._block(w, hidden, positions, attend)
        self._hidden.update(zip(group, hidden.split(sizes)))

    def _attend(self, step: Step, q: Tensor, key: Tensor, v: Tensor) -> Tensor:
        """Attention of one batch. Its KV block is stored again, or about to be, when this returns."""
        i, j, k = step
        interrupts.check()
        batch, after = self.batches[k], self.prefetch.held(j, k, i + 1)
        cache = self.caches.get(j - 1, k, self.prefetch.held(j, k, i))
        # with attention on the CPU the cache stays in RAM, and the query goes to it
        q, key, v = (x.to(cache.k[0].device) for x in (q, key, v))
        with cache.rows(batch.rows) as few:
            context, slots = self.rules[j - 1].decode(few, q, key, v, batch.ends, i)
        self.caches.store_step(j - 1, k, after, cache, slots, batch.rows)
        self.prefetch.caches(step)  # a staging buffer is free now
        return context.to(self.device.torch_device)

    # both ends of the model

    def _embed(self, ids: Tensor, positions: Tensor, w: Weights) -> Tensor:
        hidden = self.family.embed(self.spec, w, self.weights.rows, ids.flatten(), _flat(positions))
        return hidden.unflatten(0, ids.shape)

    def _logits(self, i: int, w: Weights, sequences: list[Sequence], hidden: Tensor) -> None:
        """Hand the logits of some rows to the sink. hidden: (B, E), contiguous."""
        for at in range(0, len(sequences), HEAD_ROWS):
            interrupts.check()
            logits = self.family.logits(self.spec, w, hidden[at : at + HEAD_ROWS])
            self.sink.take(i, sequences[at : at + HEAD_ROWS], logits)


def _flat(positions: Tensor) -> Positions:
    return Positions(positions.flatten(), (positions.amax(1, keepdim=True) + 1).expand(positions.shape).flatten())
