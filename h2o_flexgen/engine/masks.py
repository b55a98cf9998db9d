"""Which tokens may come next in structured output: found in a thread of its own while the layers run, so that no pass
waits for it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from importlib import import_module

import numpy as np

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.structured import Structured, llguidance, one_line

#: bits of a word of a mask
WORD = 32
#: grammars that are kept compiled
COMPILED = 32


@lru_cache(maxsize=1)  # making one takes a second
def guided_tokenizer(tokenizer, vocab: int, eos_ids: tuple[int, ...]):
    """A tokenizer as llguidance has it."""
    return import_module("llguidance.hf").from_tokenizer(tokenizer, vocab, list(eos_ids) or None)


class Masks:
    """Which tokens may come next of each row with structured output.

    Args:
        tokenizer: a fast one of transformers. Raises UserError for another.
        vocab: logits of a row.
        eos_ids: token ids that end a text.
    """

    def __init__(self, tokenizer, vocab: int, eos_ids: frozenset[int]):
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.eos_ids = eos_ids
        self._matchers: dict[Sequence, object] = {}
        self._places: dict[Sequence, int] = {}  # in `_bits`, of the rows of the pass
        self._bits = np.zeros((0, 0), np.uint32)
        self._forced: dict[Sequence, list[int]] = {}  # of these, the tokens after the next one, if only they fit
        self._work: Future | None = None
        # rows mostly share one, and a copy takes a tenth of the time and the memory
        self._compiled = lru_cache(maxsize=COMPILED)(self._compile)

    def _compile(self, structured: Structured):
        guided = guided_tokenizer(self.tokenizer, self.vocab, tuple(sorted(self.eos_ids)))
        return llguidance().LLMatcher(guided, structured.source)

    def expect(self, rows: list[Sequence], at_once: bool) -> None:
        """Begin to compute the masks of rows that will have logits in this pass. With `at_once` tokens that must follow
        are appended together."""
        wanted = [s for s in rows if s.params.structured is not None and s.finish_reason is None]
        self._matchers = {s: self._matchers[s] for s in wanted if s in self._matchers}  # the others have ended
        self._work = self._pool.submit(self._compute, wanted, at_once) if wanted else None

    def _compute(self, rows: list[Sequence], at_once: bool) -> None:
        self._places = {s: place for place, s in enumerate(rows)}
        self._bits = np.zeros((len(rows), -(-self.vocab // WORD)), np.uint32)
        matchers = list(map(self._matcher, rows))
        sound = [(matcher, place) for place, matcher in enumerate(matchers) if not matcher.is_error()]
        # one call for all rows: under the GIL each would wait for the thread that runs the layers
        self._executor.unsafe_compute_mask_ptr(sound, self._bits.ctypes.data, self._bits[0].nbytes, len(rows))
        self._forced = {}
        for matcher, place in sound if at_once else ():
            if forced := matcher.compute_ff_tokens():
                self._forced[rows[place]] = forced[1:]
                self._bits[place] = 0
                self._bits[place, forced[0] // WORD] = 1 << forced[0] % WORD

    def _matcher(self, s: Sequence):
        if s not in self._matchers:
            self._matchers[s] = self._compiled(s.params.structured).deep_copy()
            self._matchers[s].consume_tokens(s.tokens)
        return self._matchers[s]

    @cached_property
    def _executor(self):
        return llguidance().LLExecutor(num_threads=1)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "masks")

    def allowed(self, rows: list[Sequence]) -> np.ndarray:
        """(R, words) uint32: a bit for each token that may come next, the lowest one first."""
        self._work.result()
        return self._bits[[self._places[s] for s in rows]]

    def advance(self, s: Sequence) -> None:
        """Take the newest token of a row into account, and append those that must follow it."""
        matcher = self._matchers[s]
        matcher.consume_token(s.tokens[-1])
        forced = [] if s.params.stop else self._forced.get(s, [])[: max(0, s.params.max_tokens - len(s.tokens) - 1)]
        ends = self.eos_ids.union(s.params.stop_token_ids)
        forced = forced[: next((n for n, token in enumerate(forced) if token in ends), None)]
        if forced and matcher.consume_tokens(forced):
            s.tokens += forced
            s.is_whole = matcher.is_stopped() and not matcher.is_error()

    def is_complete(self, s: Sequence) -> bool:
        """Whether the text of a row with structured output cannot go on. A row that has become too complex, or cannot
        be met, ends with an error."""
        if s.params.structured is None:
            return False
        self._work.result()
        matcher = self._matchers[s]
        if matcher.is_error():
            s.fail(f"structured output: {one_line(matcher.get_error())}")
        return matcher.is_stopped() and not matcher.is_error()
