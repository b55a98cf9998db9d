"""Streams: texts without end. Their caches, of a fixed size, stay from one turn to the next; all of them are one block.

A stream is a row that does not leave its place. A turn feeds tokens to some of the streams, chunk by chunk, and may
then generate. Each chunk is a prefill over the caches as they are, in a pass of its own. All chunks of a text but the
last are of the same size, and texts of several lengths end with the same chunk, so that all streams of a turn decode
together:

    stream 0    chunk  chunk  chunk  token  token  token
    stream 1                  chunk  token
    stream 2    (nothing to do: its cache stays as it is)

The last token of a text waits for the next turn, since only what is behind it shows what the model made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from h2o_flexgen.engine.batch import Piece, Sequence, cut
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.engine.report import Meter
from h2o_flexgen.engine.sampling import Sampler, TeacherForcing
from h2o_flexgen.engine.scheduler import BatchPass, Pass, prompt_pieces
from h2o_flexgen.engine.step import LogitsSink, Walk
from h2o_flexgen.engine.stores import Stores
from h2o_flexgen.errors import UserError

#: bits of a random number's key that count the tokens of a stream
KEY_BITS = 40


@dataclass
class Stream:
    """One text.

    Attributes:
        seen: tokens that have been fed; last_prompt: of those, up to the end of the last chunk.
        waiting: the last token of the text, which has not been fed; none at the beginning.
    """

    seen: int = 0
    last_prompt: int = 0
    waiting: list[int] = field(default_factory=list)


class Streams:
    """The streams of one block.

    Args:
        stores: of a job whose workload is a chunk of each stream.

    Attributes:
        ended: why these streams cannot be used any more; None while they can.
    """

    def __init__(self, stores: Stores, count: int):
        self.stores: Stores | None = stores
        self.job = stores.job
        self.chunk = stores.job.workload.longest
        self.streams = [Stream() for _ in range(count)]
        self.meter = Meter(stores.transport)
        self.ended: str | None = None
        stores.clear_caches()

    def end(self, why: str) -> None:
        """Give the caches back."""
        if self.ended is None:
            self.ended = why
            self.stores.close()
            self.stores = None

    def length(self, row: int, tokens: int) -> int:
        """Tokens that stream `row` has fed when so many more have come, the last of which waits."""
        stream = self.streams[row]
        return stream.seen + len(stream.waiting) + tokens - 1

    def feed(self, texts: dict[int, list[int]]) -> dict[int, list[float]]:
        """Go on with these token ids, one or more for each of these streams.

        Returns:
            The log-probability of each token, but of the first one of a stream.

        Raises:
            UserError: the model gives NaN for one of the texts.
        """
        inputs = {}
        targets = {}
        for row, ids in texts.items():
            waiting = self.streams[row].waiting
            inputs[row] = waiting + ids[:-1]
            targets[row] = ids if waiting else ids[1:]
        found = {row: [] for row in texts}
        for is_last, chunks in self._rounds(inputs):
            few = {row: targets[row][begin:end] for row, (begin, end) in chunks.items()}
            prompts = {row: inputs[row][begin:end] for row, (begin, end) in chunks.items()}
            for s in self._run(prompts, TeacherForcing(few), is_last, wanted=0):
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
        """Go on with these token ids, and with what the model makes of them; where there are none, with the token that
        waits alone. What is generated belongs to the text of the stream.

        Raises:
            UserError: as `feed`.
        """
        inputs = {row: self.streams[row].waiting + ids for row, ids in texts.items()}
        sequences = []
        for is_last, chunks in self._rounds(inputs):
            prompts = {row: inputs[row][begin:end] for row, (begin, end) in chunks.items()}
            sequences = self._run(prompts, sampler if is_last else DiscardLogits(), is_last, params)
        for s in sequences:
            self.streams[s.index].waiting = s.tokens[-1:]
        return sequences

    def _rounds(self, inputs: dict[int, list[int]]) -> Iterator[tuple[bool, dict[int, tuple[int, int]]]]:
        """(whether it is the last, {stream: begin and end of its chunk}) of each block of chunks."""
        begins = {row: range(0, len(ids), self.chunk) for row, ids in inputs.items()}
        for left in range(max(map(len, begins.values()), default=0), 0, -1):
            few = {row: starts[-left] for row, starts in begins.items() if left <= len(starts)}
            yield left == 1, {row: (at, min(at + self.chunk, len(inputs[row]))) for row, at in few.items()}

    def _run(
        self,
        prompts: dict[int, list[int]],
        sink: LogitsSink,
        is_last: bool,
        params: dict[int, SamplingParams] | None = None,
        wanted: int | None = None,
    ) -> list[Sequence]:
        """Take a chunk of some streams through the model, and what `sink` makes of it; `wanted` as in `Sequence`."""
        rows = []
        for row in sorted(prompts):
            stream = self.streams[row]
            its_params = params[row] if params else SamplingParams(max_tokens=1)
            past = dict(length=stream.seen, prompt_end=stream.last_prompt)
            rows.append(Sequence(row, prompts[row], its_params, (row << KEY_BITS) + stream.seen, wanted=wanted, **past))
        walk = Walk(self.stores, sink, Observer(), self.meter)
        self.meter.start()
        self._pass(walk, rows, True, is_last)
        while not isinstance(sink, DiscardLogits) and (running := [s for s in rows if s.finish_reason is None]):
            self._pass(walk, running, False, is_last)
        self.stores.caches.drain()
        for s in rows:
            if s.finish_reason == "error":
                raise UserError(
                    f"the model's hidden states overflowed in stream {s.index} (use `dtype` bfloat16 or float32)"
                )
            stream = self.streams[s.index]
            stream.seen = s.length
            stream.last_prompt = s.prompt_end
        return rows

    def _pass(self, walk: Walk, rows: list[Sequence], is_chunk: bool, is_last: bool) -> None:
        """One pass in which these streams read a chunk, or decode."""
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
        pass_ = Pass(batches, cut(pieces, policy.prefill_tokens), is_last and all(s.will_end for s in rows))
        walk.run(pass_)
        self.meter.end_pass(pass_)


class DiscardLogits:
    """A sink for logits that nobody wants."""

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`."""


class StreamingSampler(Sampler):
    """A sampler that tells of every token.

    Args:
        on_tokens: is called with the sequences that have a new token.
    """

    def __init__(self, eos_ids: frozenset[int], tokenizer, on_tokens: Callable[[list[Sequence]], None]):
        super().__init__(eos_ids, tokenizer)
        self.on_tokens = on_tokens

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`."""
        super().take(sequences, logits)
        self.on_tokens(sequences)
