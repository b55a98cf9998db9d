"""One pass: a walk through the layers, in each of which prompts prefill and rows decode while its weights are there.

Layer 0 is the embedding, the last one the head, those between transformer blocks. For layer j, and each chunk of the
pass in turn:

    hidden (N, E) -> q, k, v of all its tokens -> attention, piece by piece -> MLP -> hidden (N, E)
                                                  |
                     prompts: read (behind their prefix), keep in their places of KV block (j, k)
                     decode step: one token more in KV block (j, k)

A KV block is staged when the first piece of its batch attends, and written back behind the last one.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from h2o_flexgen.engine.batch import Chunk, Piece, Sequence
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.report import Meter
from h2o_flexgen.engine.scheduler import Pass
from h2o_flexgen.engine.stores import Prefetcher, Stores
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import CacheRule
from h2o_flexgen.machine import memory
from h2o_flexgen.models.parts import Weights
from h2o_flexgen.models.registry import family
from h2o_flexgen.planning.workload import HEAD_ROWS
from h2o_flexgen.storage.kv_store import Occupied
from h2o_flexgen.utils import interrupts

#: prefill gives gaps in the heap back where the process holds more than this multiple of the plan, and at most once in
#: this many seconds
GAPS_OVER_PLAN = 1.0
GAPS_SECONDS = 0.25


class LogitsSink(Protocol):
    """What becomes of logits: a `Sampler` makes tokens of them, `TeacherForcing` scores a text."""

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Take the logits (B, V), one row for each of B sequences; one that stands several times has a row for each of
        the last tokens of its prompt.

        Append to each sequence that still runs the token that is the input of its next step, and set `finish_reason`
        where a sequence ends.
        """


class Walk:
    """Takes passes through the model.

    Args:
        sink: gets the logits.
    """

    def __init__(self, stores: Stores, sink: LogitsSink, observer: Observer, meter: Meter):
        self.stores = stores
        self.sink = sink
        self.observer = observer
        self.meter = meter
        self.spec = stores.model.spec
        self.device = stores.device
        self.weights = stores.weights
        self.dtype = stores.model.dtype
        self.family = family(self.spec.model_type)
        self.token_bytes = self.spec.hidden * self.dtype.itemsize
        self.last = len(stores.model.layers) - 1
        self.prefetch = Prefetcher(stores)
        self._gaps_released = time.perf_counter()
        self._hidden: dict[int, Tensor] = {}  # by chunk, of those that stay on the device
        self._open: dict[int, KVTensors] = {}  # KV blocks of this layer, by batch
        self._slots: dict[int, Tensor] = {}  # that a decode step has written, by batch

    @torch.inference_mode()
    def run(self, pass_: Pass) -> None:
        """Afterwards each row has its next token, or has ended."""
        self._begin(pass_)
        for j in range(self.last + 1):
            interrupts.check()
            self.prefetch.weights(j)
            w = self.weights.get(j)
            for n, chunk in enumerate(pass_.chunks):
                with self.meter.chunk(chunk):
                    self._chunk(j, n, w)
            self.weights.release(j)
            self.observer.on_layer(j)
        for chunk in pass_.chunks:
            for piece in chunk.pieces:
                piece.advance()
        if any(piece.is_prompt for chunk in pass_.chunks for piece in chunk.pieces):
            self.device.release_gaps()

    def _begin(self, pass_: Pass) -> None:
        self.pass_ = pass_
        if self.stores.has_cache:
            for k, batch in pass_.batches.items():
                if batch.opens is not None:
                    self.stores.open(k, *batch.opens)
        pieces = [piece for chunk in pass_.chunks for piece in chunk.pieces]
        self._first = {piece.batch: piece for piece in reversed(pieces) if piece.places}
        self._final = {piece.batch: piece for piece in pieces if piece.places}
        self._steps = {piece.batch: piece for piece in pieces if not piece.is_prompt}
        self._cached_lens: dict[tuple[CacheRule, int], int] = {}  # slots in use after the pass, by rule and batch
        for rule, piece in product(set(self.stores.rules), pieces):
            if piece.places:
                cached_len = max(rule.cached_len(length, prompt_end) for length, prompt_end in piece.texts_after())
                key = rule, piece.batch
                self._cached_lens[key] = max(cached_len, self._cached_lens.get(key, 0))
        self.prefetch.begin(pass_, lambda j, k: self._cached_lens[self.stores.rules[j - 1], k])
        self.prefetch.caches(0, 0)

    def _chunk(self, j: int, n: int, w: Weights) -> None:
        """Take the tokens of a chunk through a layer."""
        interrupts.check()
        chunk = self.pass_.chunks[n]
        activations = self.stores.activations
        if j == 0:
            hidden = self.family.embed(self.spec, w, self.weights.rows, chunk.ids(), chunk.positions)
        elif chunk.home is None:
            hidden = self._hidden.pop(n)
        else:
            hidden = activations.get(*chunk.home[:2])
            self.prefetch.hidden(j, n)
        if j == self.last:
            self._logits(w, chunk, hidden)
            return
        if j > 0:
            # where positions roll attention rotates: what is cached must not be
            positions = None if self.stores.job.rule.rope else chunk.positions
            hidden = self.family.block(self.spec, w, hidden, positions, partial(self._attend, j, chunk))
        if chunk.home is None:
            self._hidden[n] = hidden
        else:
            k, number, before = chunk.home
            activations.put(k, number, before * self.token_bytes, hidden)
            self._release_gaps()

    def _release_gaps(self) -> None:
        """Micro-batches leave gaps in the heap, several times as large as one of them. Giving the pages back and taking
        new ones costs up to a sixth of prefill, so it is done only where it must be."""
        is_due = time.perf_counter() - self._gaps_released > GAPS_SECONDS
        if is_due and memory.resident() > GAPS_OVER_PLAN * self.stores.job.plan.needed("ram"):
            self.device.release_gaps()
            self._gaps_released = time.perf_counter()

    # attention

    def _attend(self, j: int, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (N, H, D), k and v (N, KV, D) of a chunk -> context (N, H, D)."""
        parts = zip(chunk.pieces, *(x.split(chunk.sizes) for x in (q, k, v)))
        contexts = [self._piece(j, *part) for part in parts]
        return contexts[0] if len(contexts) == 1 else torch.cat(contexts)

    def _piece(self, j: int, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        interrupts.check()
        batch = piece.batch
        has_cache = self.stores.has_cache and bool(piece.places)
        if has_cache and piece is self._first[batch]:
            self._open[batch] = self._opened(j, batch)
        if piece.is_prompt:
            context = self._read(j, piece, q, k, v)
        else:
            context = self._decode(j, piece, q, k, v)
        if has_cache and piece is self._final[batch]:
            self._close(j, batch)
        return context

    def _read(self, j: int, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Prefill. q, k, v (N, heads, D) of the prompts' tokens."""
        rule = self.stores.rules[j - 1]
        device = self.device.torch_device
        past = piece.path and piece.path.text(j)
        q, k, v = map(piece.padded, (q, k, v))
        if piece.places and self.stores.has_cache:
            with self._open[piece.batch].rows(piece.places) as cache:
                if self.stores.is_stream:
                    past = rule.past(cache, piece.lengths.length, piece.prompt_ends, self.dtype).to(device)
                context, text = rule.read(q, k, v, piece.lengths, past, cache.form)
                rule.keep(cache, text.to(cache.k[0].device))
        else:
            context, text = rule.read(q, k, v, piece.lengths, past, self.stores.form)
            if not piece.places:
                piece.rows[0].texts[j] = text.since(piece.shared)
        for node in piece.frees:
            del node.texts[j]
        return piece.flat(context)

    def _decode(self, j: int, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (B, heads, D) of each row's newest token."""
        cache = self._open[piece.batch]
        # with attention on the CPU the cache stays in RAM, and the query goes to it
        q, k, v = (x[:, :, None].to(cache.k[0].device) for x in (q, k, v))
        with cache.rows(piece.places) as rows:
            context, slots = self.stores.rules[j - 1].decode(rows, q, k, v, piece.lengths)
        self._slots[piece.batch] = slots
        return context[:, :, 0].to(self.device.torch_device)

    def _opened(self, j: int, k: int) -> KVTensors:
        """A KV block, with the rows that have moved in their new places."""
        batch = self.pass_.batches[k]
        if batch.opens is not None:
            return self.stores.caches.blank(j - 1, k)
        rule = self.stores.rules[j - 1]
        cache = self.stores.caches.get(j - 1, k, self._cached_lens[rule, k])
        for source, target in batch.moves:
            row = batch.rows[target]
            cache.move(source, target, rule.cached_len(row.length, row.prompt_end))
        return cache

    def _close(self, j: int, k: int) -> None:
        """The KV block is stored again, or about to be, when this returns."""
        batch = self.pass_.batches[k]
        cache = self._open.pop(k)
        cached_len = self._cached_lens[self.stores.rules[j - 1], k]
        if k not in self._steps:
            self.stores.caches.store_all(j - 1, k, cached_len)
        else:
            after = Occupied(cached_len, batch.places, len(batch.rows))
            places = self._steps[k].places
            self.stores.caches.store_step(j - 1, k, cache, self._slots.pop(k), places, after)
        self.prefetch.caches(j, k)  # a staging buffer is free now

    # the end of the model

    def _logits(self, w: Weights, chunk: Chunk, hidden: Tensor) -> None:
        """Hand the logits that are wanted to the sink."""
        wanted = []
        begin = 0
        for piece in chunk.pieces:
            wanted += [(s, begin + n) for s, n in piece.logits()]
            begin += piece.size
        for at in range(0, len(wanted), HEAD_ROWS):
            interrupts.check()
            sequences, places = zip(*wanted[at : at + HEAD_ROWS])
            rows = hidden[list(places)] if len(places) < len(hidden) else hidden
            self.sink.take(list(sequences), self.family.logits(self.spec, w, rows))
