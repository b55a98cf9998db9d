"""One pass: a walk through the stages of a model, in each of which prompts prefill and rows decode while the weights of
the stage are on the device.

The stages are the embedding, the units of each layer, and the head. In layer j each chunk of the pass goes, in turn:

    hidden (N, E) -> q, k, v of all its tokens -> attention, piece by piece -> MLP -> hidden (N, E)
                                                  |
                     prompts: read (after their prefix), keep in their places of KV block (j, k)
                     decode step: append one token to KV block (j, k)

With a mixture of experts the layer's first stage ends with the router, and each group of experts is a stage of its own,
which all chunks pass before the next one. Until then a chunk's state is (3, N, E): the hidden states, what experts
read, and the sum of what they return. What a layer adds to that sum is one more stage.

A KV block is staged when the first piece of its batch attends, and written back after the last one.

With several devices the stages of each follow those of the one before. A chunk's hidden states go to the next device
when its first stage takes them. Each has transfer queues of its own, so weights and KV blocks of its first layers
arrive while the devices before it compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from h2o_flexgen.engine.batch import Chunk, Piece, PromptPiece, Sequence
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.report import Meter
from h2o_flexgen.engine.scheduler import Pass
from h2o_flexgen.engine.stores import Prefetcher, Stores
from h2o_flexgen.kernels.experts import Routing
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import CacheRule
from h2o_flexgen.machine import memory
from h2o_flexgen.models.parts import Weights
from h2o_flexgen.models.registry import family
from h2o_flexgen.planning.workload import HEAD_ROWS
from h2o_flexgen.storage.kv_store import Occupied
from h2o_flexgen.utils import interrupts

#: prefill trims the heap when the process holds more than this multiple of the plan
TRIM_OVER_PLAN = 1.0
#: and at most once in this many seconds
TRIM_SECONDS = 0.25

#: computes one chunk of the pass, given its number, with the weights of a stage
Stage = Callable[[int, Chunk, Weights], None]


class LogitsSink(Protocol):
    """Consumes logits: a `Sampler` turns them into tokens, `TeacherForcing` scores a text."""

    def expect(self, rows: list[Sequence], at_once: bool) -> None:
        """Prepare for the logits of these rows, which a pass that begins now will compute. `at_once`: several tokens of
        a row in one pass take less time than a pass each."""

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Consume logits (B, V), one row for each of B sequences. A sequence that is listed several times has a row for
        each of the last tokens of its prompt, or of the known tokens behind it.

        Append the input of the next step to each sequence that still runs, and set `finish_reason` of those that end.
        """


@runtime_checkable
class StatesSink(LogitsSink, Protocol):
    """A sink that consumes the hidden states of prompts too."""

    def take_states(self, piece: PromptPiece, states: Tensor) -> None:
        """Consume hidden states (N, W) after the final norm, of all tokens of a piece. They may change afterwards."""


class Walk:
    """Runs passes through the model.

    Args:
        sink: receives the logits.
    """

    def __init__(self, stores: Stores, sink: LogitsSink, observer: Observer, meter: Meter):
        self.stores = stores
        self.sink = sink
        self.observer = observer
        self.meter = meter
        self.spec = stores.model.spec
        self.dtype = stores.model.dtype
        self.family = family(self.spec.model_type)
        self.token_bytes = self.spec.state_width * self.dtype.itemsize
        self._prefetchers = [Prefetcher(part, self.spec, stores.has_cache) for part in stores.parts]
        self._enter(self._prefetchers[0])
        self._at_once = stores.job.workload.row_tokens(stores.job.policy, self.part.device.is_cuda) > 1
        self._trimmed = time.perf_counter()
        self._hidden: dict[int, Tensor] = {}  # by chunk, of those that stay on the device
        self._open: dict[int, KVTensors] = {}  # KV blocks of the current layer, by batch
        self._slots: dict[int, Tensor] = {}  # written by a decode step, by batch
        self._routed: dict[int, Routing] = {}  # by chunk, in a layer of experts
        self._wanted: list[tuple[Sequence, Tensor]] = []  # rows whose logits are wanted, with their hidden states (E,)

    @torch.inference_mode()
    def run(self, pass_: Pass) -> None:
        """Give each row of a pass its next token, or end it."""
        self._begin(pass_)
        self.sink.expect(pass_.rows, self._at_once)
        for prefetch in self._prefetchers:
            if prefetch.part is not self.part:  # its chunks and waits are timed from where it can begin
                prefetch.part.device.wait(self.part.device.record())
            self._enter(prefetch)
            for number, (layer, stage) in enumerate(self._stages()):
                interrupts.check()
                self._run_stage(number, stage)
                self.observer.on_layer(layer)
                self._source = prefetch
        for piece in pass_.pieces:
            piece.advance()
        if any(piece.is_prompt for piece in pass_.pieces):
            self.part.device.release_gaps()

    def _enter(self, prefetch: Prefetcher) -> None:
        """Go on with the part of the model that is on the next device."""
        self.prefetch = prefetch
        self.part = prefetch.part

    def _stages(self) -> Iterator[tuple[int, Stage]]:
        """The stages of a device, as its weight store numbers them, each with the index of its layer in the model:
        embedding, units of the blocks, head."""
        layers = self.stores.model.layers
        span = self.part.span
        if span.start == 0:
            yield 0, self._embed
        for j in span:
            _, *units = layers[j + 1].units
            yield j + 1, partial(self._experts_chosen if units else self._block, j)
            for unit in units:
                of_experts = partial(self._experts, unit.experts, unit is units[-1])
                yield j + 1, of_experts if unit.experts else partial(self._join, j)
        if span.stop == self.spec.layers:
            yield len(layers) - 1, self._head

    def _run_stage(self, number: int, stage: Stage) -> None:
        """All chunks of the pass through a stage, given its number on the device."""
        weights = self.part.weights
        routed = self._routed.values()
        self.prefetch.weights(number, routed)
        w = weights.get(number, self.prefetch.wanted(number, routed))
        for n, chunk in enumerate(self.pass_.chunks):
            interrupts.check()
            with self.meter.chunk(chunk, self.part.device):
                stage(n, chunk, w)
        weights.release(number)

    def _begin(self, pass_: Pass) -> None:
        self.pass_ = pass_
        if self.stores.has_cache:
            for k, batch in pass_.batches.items():
                if batch.opens is not None:
                    self.stores.open(k, *batch.opens)
        pieces = pass_.pieces
        self._first = {piece.batch: piece for piece in reversed(pieces) if piece.places}
        self._final = {piece.batch: piece for piece in pieces if piece.places}
        self._steps = {piece.batch: piece for piece in pieces if not piece.is_prompt}
        self._cached_lens: dict[tuple[CacheRule, int], int] = {}  # slots in use after the pass, by rule and batch
        for rule, piece in product(set(self.stores.rules), pieces):
            if piece.places:
                cached_len = max(rule.cached_len(length, prompt_end) for length, prompt_end in piece.texts_after())
                key = (rule, piece.batch)
                self._cached_lens[key] = max(cached_len, self._cached_lens.get(key, 0))
        rules = self.stores.rules
        lens = self._cached_lens  # not `self`: a cycle would keep a job's memory until Python looks for cycles
        for prefetch in self._prefetchers:
            prefetch.begin(pass_, lambda layer, k: lens[rules[layer], k])

    # stages

    def _embed(self, n: int, chunk: Chunk, w: Weights) -> None:
        self._keep(n, chunk, self.family.embed(self.spec, w, self.part.weights.rows, chunk.ids(), chunk.positions))

    def _block(self, j: int, n: int, chunk: Chunk, w: Weights) -> None:
        self._keep(n, chunk, self._through(self.family.block, j, n, chunk, w))

    def _through(self, part: Callable, j: int, n: int, chunk: Chunk, w: Weights) -> Tensor:
        """The hidden states (N, E) of a chunk after a part of layer j that has the attention in it."""
        # where positions roll attention rotates, since keys are cached unrotated
        positions = None if self.stores.job.rule.rope else chunk.positions
        return part(self.spec.at(j), w, self._taken(n, chunk), positions, partial(self._attend, j, chunk))

    def _experts_chosen(self, j: int, n: int, chunk: Chunk, w: Weights) -> None:
        """A layer up to its router."""
        hidden = self._through(self.family.attention, j, n, chunk, w)
        x, routing = self.family.route(self.spec.at(j), w, hidden)
        self._routed[n] = routing
        self._keep(n, chunk, torch.stack([hidden, x, torch.zeros_like(x)]))

    def _experts(self, group: range, is_last: bool, n: int, chunk: Chunk, w: Weights) -> None:
        """A group of experts, for the tokens that were routed to them; after the last unit their sum is added."""
        state = self._taken(n, chunk)
        if chunk.home is not None and self.part.activations.moves(chunk.home.batch):
            state = state.clone()  # it is written back while its staging buffer is filled again
        hidden, x, total = state
        routing = self._routed[n]
        routing.add(group, w, partial(self.family.expert, self.spec), x, total)
        if is_last:
            del self._routed[n]
            state = hidden.add_(total)
        self._keep(n, chunk, state)

    def _join(self, j: int, n: int, chunk: Chunk, w: Weights) -> None:
        """What layer j adds to the sum of its experts."""
        del self._routed[n]
        self._keep(n, chunk, self.family.join(self.spec.at(j), w, *self._taken(n, chunk)))

    def _head(self, n: int, chunk: Chunk, w: Weights) -> None:
        """Hand the logits that are wanted to the sink, HEAD_ROWS at a time, of all chunks together: each time the head
        may have to be read or decoded."""
        hidden = self._taken(n, chunk, is_head=True)
        if isinstance(self.sink, StatesSink):
            self._hand_states(chunk, hidden, w)
        begin = 0
        for piece in chunk.pieces:
            self._wanted += [(s, hidden[begin + token]) for s, token in piece.logits()]
            begin += piece.size
        least = 1 if chunk is self.pass_.chunks[-1] else HEAD_ROWS
        while len(self._wanted) >= least:
            interrupts.check()
            sequences, rows = zip(*self._wanted[:HEAD_ROWS])
            del self._wanted[:HEAD_ROWS]
            self.sink.take(list(sequences), self.family.logits(self.spec, w, torch.stack(rows)))
        self._wanted = [(s, row.clone()) for s, row in self._wanted]  # the next chunk may take the place of this one

    def _hand_states(self, chunk: Chunk, hidden: Tensor, w: Weights) -> None:
        """Hand the hidden states (N, E) of a chunk's prompts to the sink, after the final norm."""
        for piece, states in zip(chunk.pieces, hidden.split(chunk.sizes)):
            if piece.is_prompt:
                self.sink.take_states(piece, self.family.final_states(self.spec, w, states))

    # hidden states between stages

    def _taken(self, n: int, chunk: Chunk, is_head: bool = False) -> Tensor:
        """The hidden states (N, E) of chunk `n`, from the stage before, which may have been on another device."""
        if chunk.home is None:
            hidden = self._hidden.pop(n)
        else:
            hidden = self._source.part.activations.get(chunk.home.batch, chunk.home.number)
            self._source.hidden(n, is_head)
            if self._source is not self.prefetch:
                self.prefetch.hidden(n, is_head)  # the next stage begins with what this one has put
        return hidden.to(self.part.device.torch_device)

    def _keep(self, n: int, chunk: Chunk, hidden: Tensor) -> None:
        """Keep the hidden states (N, E) of chunk `n` for the next stage."""
        if chunk.home is None:
            self._hidden[n] = hidden
            return
        home = chunk.home
        self.part.activations.put(home.batch, home.number, home.before * self.token_bytes, hidden)
        self._trim_heap()

    def _trim_heap(self) -> None:
        """Micro-batches leave gaps in the heap, several times as large as one of them. Trimming the heap and growing it
        again costs up to a sixth of prefill, so it is done only where it must be."""
        is_due = time.perf_counter() - self._trimmed > TRIM_SECONDS
        if is_due and memory.resident() > TRIM_OVER_PLAN * self.stores.job.plan.needed("ram"):
            self.part.device.release_gaps()
            self._trimmed = time.perf_counter()

    # attention

    def _attend(self, j: int, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q (N, H, D), k and v (N, KV, D) of a chunk, sinks (H,) -> context (N, H, D)."""
        parts = zip(chunk.pieces, *(x.split(chunk.sizes) for x in (q, k, v)))
        contexts = [self._piece(j, *part, sinks) for part in parts]
        return contexts[0] if len(contexts) == 1 else torch.cat(contexts)

    def _piece(self, j: int, piece: Piece, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        interrupts.check()
        batch = piece.batch
        has_cache = self.stores.has_cache and bool(piece.places)
        if has_cache and piece is self._first[batch]:
            self._open[batch] = self._opened(j, batch)
        if piece.is_prompt:
            context = self._read(j, piece, q, k, v, sinks)
        else:
            context = self._decode(j, piece, q, k, v, sinks)
        if has_cache and piece is self._final[batch]:
            self._close(j, batch)
        return context

    def _read(self, j: int, piece: Piece, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Prefill. q, k, v (N, heads, D) of the prompts' tokens."""
        rule = self.stores.rules[j]
        device = self.part.device.torch_device
        past = piece.path and piece.path.text(j)
        q, k, v = map(piece.padded, (q, k, v))
        if piece.places and self.stores.has_cache:
            with self._open[piece.batch].rows(piece.places) as cache:
                if self.stores.is_stream:
                    past = rule.past(cache, piece.lengths.length, piece.prompt_ends, self.dtype).to(device)
                context, text = rule.read(q, k, v, piece.lengths, past, cache.form, sinks)
                rule.keep(cache, text.to(cache.k[0].device))
        else:
            context, text = rule.read(q, k, v, piece.lengths, past, self.stores.form(q.shape[-1]), sinks)
            if not piece.places:
                piece.rows[0].texts[j] = text.tail(piece.shared)
        for node in piece.frees:
            del node.texts[j]
        return piece.flat(context)

    def _decode(self, j: int, piece: Piece, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """q, k, v (N, heads, D) of the rows' newest tokens."""
        cache = self._open[piece.batch]
        # with attention on the CPU the cache stays in RAM, and the query goes to it
        device = cache.k[0].device
        qkv = [x[:, :, None].to(device) for x in (q, k, v)]
        sinks = None if sinks is None else sinks.to(device)
        decode = self.stores.rules[j].decode
        first, *others = piece.rounds
        with cache.rows(first.places) as rows:
            inputs = [x[first.tokens] for x in qkv] if others else qkv
            context, slots = decode(rows, *inputs, first.lengths, sinks)
        if others:
            context = torch.empty_like(qkv[0]).index_copy_(0, torch.tensor(first.tokens, device=device), context)
        for each in others:  # a token that was known goes the same way as one that was chosen
            with cache.rows(each.places) as rows:
                found, _ = decode(rows, *(x[each.tokens] for x in qkv), each.lengths, sinks)
            context[each.tokens] = found
        self._slots[piece.batch] = slots
        return context[:, :, 0].to(self.part.device.torch_device)

    def _opened(self, j: int, k: int) -> KVTensors:
        """A KV block, after its rows have moved to their new places."""
        batch = self.pass_.batches[k]
        if batch.opens is not None:
            return self.part.caches.blank(j, k)
        rule = self.stores.rules[j]
        cache = self.part.caches.get(j, k, self._cached_lens[rule, k])
        for source, target in batch.moves:
            row = batch.rows[target]
            cache.move(source, target, rule.cached_len(row.length, row.prompt_end))
        return cache

    def _close(self, j: int, k: int) -> None:
        """Store the KV block, or start to."""
        batch = self.pass_.batches[k]
        cache = self._open.pop(k)
        cached_len = self._cached_lens[self.stores.rules[j], k]
        if k not in self._steps:
            self.part.caches.store_all(j, k, cached_len)
        else:
            after = Occupied(cached_len, batch.places, len(batch.rows))
            places = self._steps[k].places
            self.part.caches.store_step(j, k, cache, self._slots.pop(k), places, after)
        self.prefetch.caches(j, k)  # into the staging buffer that is free now
