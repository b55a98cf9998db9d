"""Streams: texts without end. Their caches, of a fixed size, are kept from one turn to the next; all are one block.

A stream is a row that does not leave its place. A turn feeds tokens to some of the streams, chunk by chunk, and may
then generate. Each chunk is a prefill on top of the caches, in a pass of its own. All chunks of a text but the last one
have the same size, and the last chunks of all texts share a pass, so that all streams of a turn decode together:

    stream 0    chunk  chunk  chunk  token  token  token
    stream 1                  chunk  token
    stream 2    (idle: its cache does not change)

The last token of a text waits for the next turn, since its logits predict the token that comes then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from h2o_flexgen.engine.batch import Piece, Sequence, cut
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.engine.report import Meter
from h2o_flexgen.engine.sampling import Sampler, TeacherForcing
from h2o_flexgen.engine.scheduler import BatchPass, Pass, prompt_pieces
from h2o_flexgen.engine.step import LogitsSink, Walk
from h2o_flexgen.engine.stores import Stores
from h2o_flexgen.errors import UserError

#: low bits of a random number's key, which count the tokens of a stream
KEY_BITS = 40


@dataclass
class Stream:
    """One text.

    Attributes:
        seen: tokens that have been fed.
        last_prompt: of those, up to the end of the last chunk.
        waiting: the last token of the text, which has not been fed; empty at the beginning.
    """

    seen: int = 0
    last_prompt: int = 0
    waiting: list[int] = field(default_factory=list)


class Streams:
    """The streams of one block.

    Args:
        stores: of a job whose workload is a chunk of each stream.

    Attributes:
        ended: why these streams can no longer be used; None while they can.
    """

    def __init__(self, stores: Stores, count: int):
        self.stores: Stores | None = stores
        self.job = stores.job
        self.chunk = stores.job.workload.longest
        self.streams = [Stream() for _ in range(count)]
        self.meter = Meter(stores.parts[-1].transport)
        self.ended: str | None = None
        stores.clear_caches()

    def end(self, why: str) -> None:
        """Free the caches. `why`: for the error that later calls raise."""
        if self.ended is None:
            self.ended = why
            self.stores.close()
            self.stores = None

    def length(self, row: int, tokens: int) -> int:
        """The tokens that stream `row` will have been fed once it gets `tokens` more, the last of which waits."""
        stream = self.streams[row]
        return stream.seen + len(stream.waiting) + tokens - 1

    def feed(self, texts: dict[int, list[int]]) -> dict[int, list[float]]:
        """Feed token ids, one or more to each of these streams; returns the log-probability of each token, except the
        first one of a stream. Raises UserError if the model gives NaN for one of the texts."""
        inputs = {}
        targets = {}
        for row, ids in texts.items():
            waiting = self.streams[row].waiting
            inputs[row] = waiting + ids[:-1]
            targets[row] = ids if waiting else ids[1:]
        found = {row: [] for row in texts}
        for is_last, chunks in self._rounds(inputs):
            scored = {row: targets[row][begin:end] for row, (begin, end) in chunks.items()}
            prompts = {row: inputs[row][begin:end] for row, (begin, end) in chunks.items()}
            for s in self._run(prompts, TeacherForcing(scored), is_last, wanted=0):
                found[s.index] += s.logprobs
        for row, ids in texts.items():
            self.streams[row].waiting = ids[-1:]
        return found

    def generate(
        self,
        texts: dict[int, list[int]],
        params: dict[int, SamplingParams],
        sampler: Sampler,
    ) -> list[Sequence]:
        """Feed token ids to streams, and generate; without ids, from the waiting token. The generated tokens become
        part of the stream's text. Raises UserError as `feed`."""
        inputs = {row: self.streams[row].waiting + ids for row, ids in texts.items()}
        sequences = []
        for is_last, chunks in self._rounds(inputs):
            prompts = {row: inputs[row][begin:end] for row, (begin, end) in chunks.items()}
            sequences = self._run(prompts, sampler if is_last else DiscardLogits(), is_last, params)
        for s in sequences:
            self.streams[s.index].waiting = s.tokens[-1:]
        return sequences

    def _rounds(self, inputs: dict[int, list[int]]) -> Iterator[tuple[bool, dict[int, tuple[int, int]]]]:
        """(whether it is the last, {stream: (begin, end) of its chunk}) of each round of chunks that share a pass."""
        begins = {row: range(0, len(ids), self.chunk) for row, ids in inputs.items()}
        for left in range(max(map(len, begins.values()), default=0), 0, -1):
            starts = {row: begin[-left] for row, begin in begins.items() if left <= len(begin)}
            yield left == 1, {row: (at, min(at + self.chunk, len(inputs[row]))) for row, at in starts.items()}

    def _run(
        self,
        prompts: dict[int, list[int]],
        sink: LogitsSink,
        is_last: bool,
        params: dict[int, SamplingParams] | None = None,
        wanted: int | None = None,
    ) -> list[Sequence]:
        """Run a chunk of some streams, and the decode steps that `sink` asks for; `wanted` as in `Sequence`."""
        rows = []
        for row in sorted(prompts):
            stream = self.streams[row]
            s = Sequence(
                row,
                prompts[row],
                params[row] if params else SamplingParams(max_tokens=1),
                key=(row << KEY_BITS) + stream.seen,
                wanted=wanted,
                length=stream.seen,
                prompt_end=stream.last_prompt,
            )
            rows.append(s)
        walk = Walk(self.stores, sink, Observer(), self.meter)
        self.meter.start()
        self._pass(walk, rows, is_chunk=True, is_last=is_last)
        while not isinstance(sink, DiscardLogits) and (running := [s for s in rows if s.finish_reason is None]):
            self._pass(walk, running, is_chunk=False, is_last=is_last)
        self.stores.drain()
        for s in rows:
            if s.finish_reason == "error":
                raise UserError(f"stream {s.index}: {s.error}")
            stream = self.streams[s.index]
            stream.seen = s.length
            stream.last_prompt = s.prompt_end
        return rows

    def _pass(self, walk: Walk, rows: list[Sequence], is_chunk: bool, is_last: bool) -> None:
        """One pass in which these streams prefill a chunk, or decode a token."""
        policy = self.job.policy
        batches: dict[int, BatchPass] = {}
        pieces = []
        for s in rows:
            batches.setdefault(s.index // policy.gpu_batch_size, BatchPass([])).rows.append(s)
        for k, batch in batches.items():
            places = [s.index % policy.gpu_batch_size for s in batch.rows]
            if is_chunk:
                pieces += prompt_pieces(k, batch.rows, places, policy.prefill_tokens)
            else:
                pieces.append(Piece(k, batch.rows, places))
        pass_ = Pass(batches, cut(pieces, self.stores.limits), is_last and all(s.will_end for s in rows))
        walk.run(pass_)
        self.meter.end_pass(pass_)


class DiscardLogits:
    """A sink that ignores logits, for chunks that only fill the caches."""

    def expect(self, rows: list[Sequence], at_once: bool) -> None:
        """As `step.LogitsSink`."""

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`."""


class StreamingSampler(Sampler):
    """A sampler with a callback after every step.

    Args:
        on_tokens: called with the sequences that have a new token.
    """

    def __init__(self, model: LoadedModel, on_tokens: Callable[[list[Sequence]], None]):
        super().__init__(model.eos_ids, model.tokenizer, model.spec.vocab)
        self.on_tokens = on_tokens

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`."""
        super().take(sequences, logits)
        self.on_tokens(sequences)
