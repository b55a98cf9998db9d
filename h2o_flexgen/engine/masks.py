"""Which tokens may come next in structured output: found in a thread of its own while the layers run, so that no pass
waits for it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.structured import llguidance, one_line

#: bits of a word of a mask
WORD = 32


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
        self._bits: dict[Sequence, np.ndarray] = {}  # (words,) int32, of the rows of the pass
        self._forced: dict[Sequence, list[int]] = {}  # of these, the tokens after the next one, if only they fit
        self._work: Future | None = None

    def expect(self, rows: list[Sequence]) -> None:
        """Begin to compute the masks of rows that will have logits in this pass."""
        wanted = [s for s in rows if s.params.structured is not None and s.finish_reason is None]
        self._work = self._pool.submit(self._compute, wanted) if wanted else None

    def _compute(self, rows: list[Sequence]) -> None:
        self._bits = {}
        self._forced = {}
        words = -(-self.vocab // WORD)
        for s in rows:
            bits = self._bits[s] = np.zeros(words, np.int32)
            matcher = self._matcher(s)
            if matcher.is_error():  # which `advance` reports
                continue
            only, *self._forced[s] = matcher.compute_ff_tokens() or [None]
            if only is None:
                matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            else:
                bits.view(np.uint32)[only // WORD] = 1 << only % WORD

    def _matcher(self, s: Sequence):
        if s not in self._matchers:
            found = llguidance().LLMatcher(self._guided_tokenizer, s.params.structured.source)
            self._matchers[s] = found
            found.consume_tokens(s.tokens)
        return self._matchers[s]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "masks")

    @cached_property
    def _guided_tokenizer(self):
        from_tokenizer = import_module("llguidance.hf").from_tokenizer
        return from_tokenizer(self.tokenizer, self.vocab, sorted(self.eos_ids) or None)

    def apply(self, logits: Tensor, rows: list[Sequence]) -> None:
        """Set the logits (R, V), floats, of tokens that must not come next to minus infinity."""
        self._work.result()
        bits = np.stack([self._bits[s] for s in rows]).view(np.uint8)
        allowed = np.unpackbits(bits, axis=1, bitorder="little")[:, : logits.shape[1]]
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)

    def advance(self, s: Sequence) -> None:
        """Take the newest token of a row into account, and append those that must follow it. A row that has become too
        complex ends with an error."""
        matcher = self._matchers[s]
        matcher.consume_token(s.tokens[-1])
        forced = [] if s.params.stop else self._forced.get(s, [])[: max(0, s.params.max_tokens - len(s.tokens) - 1)]
        ends = self.eos_ids.union(s.params.stop_token_ids)
        forced = forced[: next((n for n, token in enumerate(forced) if token in ends), None)]
        if forced and matcher.consume_tokens(forced):
            s.tokens += forced
        if matcher.is_error():
            s.fail(f"structured output: {one_line(matcher.get_error())}")

    def is_complete(self, s: Sequence) -> bool:
        """Whether the text of a row with structured output cannot go on."""
        if s.params.structured is None:
            return False
        self._work.result()
        return self._matchers[s].is_stopped()

    def forget(self, s: Sequence) -> None:
        """Free what a row that has ended needed."""
        self._matchers.pop(s, None)
