"""What one layer does: prefill of a batch in micro-batches, a decode step of a group of batches."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from h2o_flexgen import interrupts
from h2o_flexgen.engine.batch import Batch, Sequence, prompt_positions
from h2o_flexgen.engine.prefetch import Prefetcher
from h2o_flexgen.engine.schedule import Step
from h2o_flexgen.engine.stores import Job, Stores
from h2o_flexgen.models.parts import Weights
from h2o_flexgen.models.registry import family
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.device import Device
from h2o_flexgen.sizes import HEAD_ROWS, matmul_groups

#: least time between two times that prefill gives back gaps in the heap
GAPS_SECONDS = 0.25


class LogitsSink(Protocol):
    """What becomes of a step's logits: `sampling.Sampler` makes tokens of them, `scoring.TeacherForcing` scores a text.

    Attributes:
        every_position: prefill gives the logits behind every token of a prompt but the last, one after the other.
    """

    every_position: bool

    def take(self, i: int, sequences: list[Sequence], logits: Tensor) -> bool:
        """Take the logits (B, V) of token step i, one row for each of B sequences.

        Append to each sequence that still runs the token that is the input of its next step, and set `finish_reason`
        where a sequence ends. Returns whether all rows are finite.
        """


class LayerSteps:
    """The steps of one block. Layer 0 is the embedding, the last one the head, those between transformer blocks.

    Attributes:
        all_finite: whether all logits were. If not, NaN may be left in slots of the cache.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        dtype: torch.dtype,
        job: Job,
        stores: Stores,
        batches: list[Batch],
        prefetch: Prefetcher,
        sink: LogitsSink,
    ):
        self.spec, self.device, self.job, self.stores = spec, device, job, stores
        self.batches, self.prefetch, self.sink = batches, prefetch, sink
        self.family = family(spec.model_type)
        self.token_bytes = spec.hidden * dtype.itemsize
        self.last = prefetch.last
        self._gaps_released = time.perf_counter()
        self.all_finite = True
        self._hidden: dict[int, Tensor] = {}  # by batch, (B, 1, E): decode's hidden states stay on the device

    # prefill

    def prefill(self, step: Step, w: Weights) -> None:
        """One layer of one batch, micro-batch by micro-batch."""
        _, j, k = step
        batch = self.batches[k]
        fills = 0 < j < self.last and not self.job.workload.prefill_only
        cache = self.stores.caches.blank(j - 1, k) if fills else None
        if j == self.last:  # prefill needs no staging buffer of the cache any more
            self.prefetch.caches(step)
        for m in range(len(batch.micro)):
            interrupts.check()
            if j == 0:
                self._embed_prompts(k, m, w)
                continue
            hidden = self._load_hidden(step, m)
            if j == self.last:
                self._prompt_logits(w, batch.sequences[slice(*batch.micro[m])], hidden)
            else:
                self._prefill_block(step, m, w, cache, hidden)
        if cache is not None:
            self.stores.caches.store_all(j - 1, k, batch.longest)

    def _prompt_logits(self, w: Weights, sequences: list[Sequence], hidden: Tensor) -> None:
        """hidden: (B, T, E) of these prompts."""
        ends = [len(s.prompt) - 1 for s in sequences]
        if self.sink.every_position:
            places = [(row, t) for row, end in enumerate(ends) for t in range(end)]
        else:
            places = list(enumerate(ends))
        rows, columns = (torch.tensor(each) for each in zip(*places))
        self._logits(0, w, [sequences[row] for row, _ in places], hidden[rows, columns])

    def _embed_prompts(self, k: int, m: int, w: Weights) -> None:
        batch = self.batches[k]
        ids = batch.prompt_ids(*batch.micro[m])
        positions = prompt_positions(batch.lengths[slice(*batch.micro[m])], ids.shape[1])
        self._store_hidden(k, m, self._embed(ids, positions, w))

    def _prefill_block(self, step: Step, m: int, w: Weights, cache, hidden: Tensor) -> None:
        batch = self.batches[step.k]
        begin, end = batch.micro[m]
        lengths = batch.lengths[begin:end]
        attend = partial(self.job.rule.prefill, cache and cache.rows(begin, end), lengths=lengths)
        positions = prompt_positions(lengths, hidden.shape[1])
        self._store_hidden(step.k, m, self.family.block(self.spec, w, hidden, positions, attend))
        if self.gaps_are_due and memory.resident() > self.job.ram:  # a layer may take seconds
            self.release_gaps()

    def _store_hidden(self, k: int, m: int, hidden: Tensor) -> None:
        self.stores.activations.put(k, m, self._offset(k, m), hidden)

    def _load_hidden(self, step: Step, m: int) -> Tensor:
        """(B, T, E) of a micro-batch; the next one is being fetched when this returns."""
        k, activations = step.k, self.stores.activations
        hidden = activations.get(k, m, self._offset(k, m))
        if m + 1 < len(self.batches[k].micro):
            activations.prefetch(k, m + 1, self._offset(k, m + 1))
        else:
            self.prefetch.hidden(step)
        return hidden

    def _offset(self, k: int, m: int) -> int:
        """Where the hidden states of a micro-batch begin in those of its batch, in bytes."""
        batch = self.batches[k]
        return batch.micro[m][0] * batch.longest * self.token_bytes

    @property
    def gaps_are_due(self) -> bool:
        """Micro-batches leave gaps in the heap, several times as large as one of them. Giving the pages back and taking
        new ones costs time, so it is done seldom."""
        return time.perf_counter() - self._gaps_released > GAPS_SECONDS

    def release_gaps(self) -> None:
        self.device.release_gaps()
        self._gaps_released = time.perf_counter()

    # decode

    def groups(self, active: list[int]) -> list[list[int]]:
        """The batches that go through the matmuls of a decode step together."""
        sizes = [len(self.batches[k].sequences) for k in active]
        return [active[begin:end] for begin, end in matmul_groups(sizes)]

    def decode(self, i: int, j: int, group: list[int], w: Weights) -> None:
        """One layer of one token step: matmuls of all rows at once, attention batch by batch as KV blocks arrive."""
        self.prefetch.caches(Step(i, j, group[0]))
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
        if j == self.last:
            self._logits(i, w, sequences, hidden[:, 0])
            return
        if j > 0:
            hidden = self.family.block(self.spec, w, hidden, positions, attend)
        self._hidden.update(zip(group, hidden.split(sizes)))

    def _attend(self, step: Step, q: Tensor, key: Tensor, v: Tensor) -> Tensor:
        """Attention of one batch. Its KV block is stored again, or about to be, when this returns."""
        i, j, k = step
        interrupts.check()
        held = self.prefetch.held
        cache = self.stores.caches.get(j - 1, k, held(k, i))
        # with attention on the CPU the cache stays in RAM, and the query goes to it
        q, key, v = (x.to(cache.k[0].device) for x in (q, key, v))
        context, slots = self.job.rule.decode(cache, q, key, v, self.batches[k].lengths, i)
        self.stores.caches.store_step(j - 1, k, held(k, i + 1), slots, key[:, :, 0], v[:, :, 0])
        self.prefetch.caches(step)  # a staging buffer is free now
        return context.to(self.device.torch_device)

    # both ends of the model

    def _embed(self, ids: Tensor, positions: Tensor, w: Weights) -> Tensor:
        return self.family.embed(self.spec, w, self.stores.weights.rows, ids, positions)

    def _logits(self, i: int, w: Weights, sequences: list[Sequence], hidden: Tensor) -> None:
        """Hand the logits of some rows to the sink. hidden: (B, E), contiguous."""
        for at in range(0, len(sequences), HEAD_ROWS):
            interrupts.check()
            logits = self.family.logits(self.spec, w, hidden[at : at + HEAD_ROWS])
            self.all_finite &= self.sink.take(i, sequences[at : at + HEAD_ROWS], logits)
