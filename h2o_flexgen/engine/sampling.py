"""Sinks of logits: one samples tokens, the other scores given texts."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.logits import LogitChanges
from h2o_flexgen.engine.masks import Masks
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.engine.stop import StopStrings, decode
from h2o_flexgen.kernels.rowwise import allowed_maxima, forbid, maxima
from h2o_flexgen.planning.workload import FORCED, SAMPLE_ROWS

#: at lower temperatures sampling is greedy, and dividing by them would overflow
GREEDY_BELOW = 1e-6


class Draw(NamedTuple):
    """What decides the random number of a token, besides the seed."""

    key: int  # of the prompt, below 2**64
    step: int  # tokens that the answer has
    answer: int = 0  # which of the answers to the prompt


class Choice(NamedTuple):
    """A token for each of B rows, on the CPU."""

    tokens: Tensor  # (B,) int64
    logprobs: Tensor  # (B,) fp32, under the model, before any change; NaN where a row's logits are broken


class Sampler:
    """A sink of logits that samples a token for each sequence that still runs, by its own parameters.

    Args:
        eos_ids: token ids that end a sequence, unless its parameters ignore them; its `stop_token_ids` always do.
        tokenizer: for stop strings, bad words and structured output; None if no sequence has any.
        vocab: logits of a row; for structured output.
    """

    def __init__(self, eos_ids: frozenset[int], tokenizer=None, vocab: int = 0):
        self.eos_ids = eos_ids
        self.stop_strings = StopStrings(tokenizer)
        self.changes = LogitChanges(eos_ids, tokenizer)
        self.masks = Masks(tokenizer, vocab, eos_ids)

    def expect(self, rows: list[Sequence], at_once: bool) -> None:
        """As `step.LogitsSink`."""
        self.masks.expect(rows, at_once)

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`. A sequence with logits that are not finite ends with an error."""
        # a few rows at a time, which stay in the CPU's caches, take half the time
        for at in range(0, len(logits), SAMPLE_ROWS):
            rows = logits[at : at + SAMPLE_ROWS]
            few = sequences[at : at + SAMPLE_ROWS]
            known = _known_tokens(few)
            _score(few, rows, known)
            for s in {few[n] for n in known}:
                self._is_complete(s)
            chosen = [n for n, s in enumerate(few) if n not in known and not self._is_complete(s)]
            if chosen:
                self._take([few[n] for n in chosen], rows if len(chosen) == len(few) else rows[chosen])

    def _take(self, sequences: list[Sequence], logits: Tensor) -> None:
        draws = [Draw(s.key, len(s.tokens), s.answer) for s in sequences]
        greedy, changed = self._changed(sequences, logits)
        choice = sample(logits, [s.params for s in sequences], draws, changed, greedy)
        tops = alternatives(logits, choice.tokens, [s.params.top_logprobs for s in sequences])
        for n, (s, token, logprob) in enumerate(zip(sequences, choice.tokens.tolist(), choice.logprobs.tolist())):
            if s.append(token, tops[n].logprob if n in tops else logprob):
                if n in tops:
                    s.top_logprobs.append(tops[n].most_likely)
                self._end(s)

    def _changed(self, sequences: list[Sequence], logits: Tensor) -> tuple[dict[int, int], dict[int, Tensor]]:
        """By row: the token of greedy rows that only have a mask; the logits (V,) fp32 of other rows whose parameters
        change them."""
        masked = [n for n, s in enumerate(sequences) if s.params.structured is not None and s.finish_reason is None]
        wanted = [n for n, s in enumerate(sequences) if self.changes.are_wanted(s)]
        if not masked and not wanted:
            return {}, {}
        allowed = dict(zip(masked, self.masks.allowed([sequences[n] for n in masked]))) if masked else {}
        simple = [n for n in masked if n not in wanted and sequences[n].params.temperature < GREEDY_BELOW]
        greedy = {}
        if simple:
            found = allowed_maxima(logits[simple], np.stack([allowed[n] for n in simple]))
            greedy = dict(zip(simple, found.tolist()))
        others = sorted({*masked, *wanted}.difference(simple))
        wide = logits[others].float()
        for row, n in enumerate(others):
            if n in allowed:
                wide[row] = forbid(wide[row : row + 1], allowed[n][None])
        self.changes.apply(wide, [sequences[n] for n in others])
        for n, is_empty in zip(others, wide.isneginf().all(-1).tolist()):
            if is_empty:
                sequences[n].fail("its parameters allow no token to come next")
        return greedy, dict(zip(others, wide))

    def _end(self, s: Sequence) -> None:
        """Set `finish_reason` if the newest token ends the sequence."""
        token = s.tokens[-1]
        is_end = token in s.params.stop_token_ids or (token in self.eos_ids and not s.params.ignore_eos)
        is_long = len(s.tokens) >= s.params.min_tokens
        if s.params.structured is not None:
            self.masks.advance(s)
        if s.params.stop and is_long:
            s.text = self.stop_strings.text_before(s.tokens, s.params.stop, s.params.min_tokens)
        if is_end and s.text is not None:
            # a stop string may begin inside the text of the last token, which is left out
            s.text = min(s.text, decode(self.stop_strings.tokenizer, s.tokens[:-1]), key=len)
        if s.finish_reason is None and (is_end or s.text is not None):
            s.finish_reason = "stop"
        elif not self._is_complete(s) and s.finish_reason is None and len(s.tokens) == s.params.max_tokens:
            s.finish_reason = "length"

    def _is_complete(self, s: Sequence) -> bool:
        """End a structured output that cannot go on, without the token that ends a text, once all of it is scored."""
        if s.finish_reason is not None or s.pending or not self.masks.is_complete(s):
            return False
        s.text = decode(self.stop_strings.tokenizer, s.tokens)
        s.finish_reason = "stop"
        return True


def _known_tokens(sequences: list[Sequence]) -> dict[int, int]:
    """By row of logits, the next token where that is known: one of the prompt, or one that was forced."""
    known = {}
    seen: Counter[Sequence] = Counter()
    for row, s in enumerate(sequences):
        place = s.wanted + len(s.prompt_logprobs) + seen[s] + 1
        if not s.tokens and place < len(s.prompt):
            known[row] = s.prompt[place]
        elif seen[s] < s.pending:
            known[row] = s.tokens[len(s.logprobs) + seen[s]]
        seen[s] += 1
    return known


def _score(sequences: list[Sequence], logits: Tensor, known: dict[int, int]) -> None:
    """Note the log-probabilities of known tokens, by row of logits (B, V)."""
    if not known:
        return
    rows = list(known)
    wanted = [s.params.top_logprobs if s.tokens else s.params.prompt_logprobs for s in map(sequences.__getitem__, rows)]
    tokens = torch.tensor(list(known.values()))
    found = alternatives(logits[rows], tokens, [max(1, count) for count in wanted])
    for n, (row, token) in enumerate(known.items()):
        s = sequences[row]
        others = found[n].most_likely if wanted[n] else {}
        if not s.tokens:
            s.prompt_logprobs.append({token: found[n].logprob} | others)
            continue
        s.logprobs.append(found[n].logprob)
        if wanted[n]:
            s.top_logprobs.append(others)
        if not math.isfinite(found[n].logprob):
            s.finish_reason = "error"


class Alternatives(NamedTuple):
    """The log-probability of a token, and of the most likely ones in its place, the most likely first."""

    logprob: float
    most_likely: dict[int, float]


def alternatives(logits: Tensor, tokens: Tensor, counts: list[int]) -> dict[int, Alternatives]:
    """By row of logits (B, V), for the tokens (B,): as many of the most likely ones as `counts` says, if any."""
    groups = defaultdict(list)  # which of equally likely ones are found may depend on how many are wanted
    for row, count in enumerate(counts):
        if count:
            groups[min(count, logits.shape[1])].append(row)
    found = {}
    for count, rows in groups.items():
        exact = logits[rows].float().log_softmax(-1)
        own = _logits_of(exact, tokens[rows].to(exact.device)).tolist()
        values, places = (each.tolist() for each in exact.topk(count))
        for n, row in enumerate(rows):
            found[row] = Alternatives(own[n], dict(zip(places[n], values[n])))
    return found


class TeacherForcing:
    """A sink of logits that continues each sequence with the tokens of its text, and scores them.

    Args:
        targets: the tokens to score, by index of the sequence: one after each token of its prompt whose logits are
            wanted, then the inputs of the next steps.

    Attributes:
        greedy_token_ids: by index of the sequence, the most likely token in the place of each scored one.
    """

    def __init__(self, targets: dict[int, list[int]]):
        self.targets = targets
        self._next = {index: iter(tokens) for index, tokens in targets.items()}
        self._at_once = False
        self.greedy_token_ids: dict[int, list[int]] = defaultdict(list)

    def expect(self, rows: list[Sequence], at_once: bool) -> None:
        """As `step.LogitsSink`."""
        self._at_once = at_once

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`."""
        targets = [next(self._next[s.index]) for s in sequences]
        logprobs, greedy = score_rows(logits, torch.tensor(targets))
        for s, target, logprob, token in zip(sequences, targets, logprobs, greedy):
            if s.append(target, logprob):
                self.greedy_token_ids[s.index].append(token)
                if len(s.logprobs) == len(self.targets[s.index]):
                    s.finish_reason = "length"
        if self._at_once:
            for s in set(sequences):
                self._append_known(s)

    def _append_known(self, s: Sequence) -> None:
        """Append as many tokens as one pass takes, if the next one is known to be an input, as the last target never
        is. HEAD_ROWS may divide the logits of a prompt: so long as some are to come, nothing is appended."""
        is_read = len(s.logprobs) >= len(s.prompt) - s.wanted
        if s.finish_reason is None and not s.pending and is_read:
            begin = len(s.tokens)
            s.tokens += self.targets[s.index][begin:-1][: FORCED - 1]


def sample(
    logits: Tensor,
    params: list[SamplingParams],
    draws: list[Draw],
    changed: dict[int, Tensor] | None = None,
    known: dict[int, int] | None = None,
) -> Choice:
    """Choose one token per row, each by its own parameters.

    Args:
        logits: (B, V) of any float type.
        params: of each of the B rows.
        draws: of each row. They and the seed alone decide its random number, whatever its batch, its neighbours and the
            pass.
        changed: by row, logits (V,) fp32 to choose by in place of the model's.
        known: by row, the token of rows for which it has been chosen.
    """
    tokens, sums = maxima(logits)
    changed = changed or {}
    for row, token in (known or {}).items():
        tokens[row] = token
    for row, its in changed.items():
        tokens[row] = its.argmax(-1)
    for group in _groups(params):
        its = torch.stack([changed[row] if row in changed else logits[row].float() for row in group])
        its = its.div_(params[group[0]].temperature)
        tokens[group] = _draw(its, [params[row] for row in group], [draws[row] for row in group])
    return Choice(tokens.cpu(), (_logits_of(logits, tokens) - sums).cpu())


def _groups(params: list[SamplingParams]) -> Iterable[list[int]]:
    """The rows that are not greedy, in groups that are drawn in the same way."""
    groups = defaultdict(list)
    for row, p in enumerate(params):
        if p.temperature >= GREEDY_BELOW:
            groups[p.temperature, p.top_k, p.top_p, p.min_p].append(row)
    return groups.values()


def _draw(logits: Tensor, params: list[SamplingParams], draws: list[Draw]) -> Tensor:
    """Draw a token for each row of logits (B, V), which have been divided by the temperature."""
    top_k = params[0].top_k
    top_p = params[0].top_p
    min_p = params[0].min_p
    if min_p > 0:
        p = torch.softmax(logits, -1)
        logits = logits.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
    if 0 < top_k < logits.shape[1]:
        order = logits.topk(top_k).indices
        logits = logits.gather(1, order)
    else:
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
    p = torch.softmax(logits, -1)
    before = p.cumsum(-1) - p
    p = p.masked_fill(before >= top_p, 0.0)  # the most likely token always stays
    cumulative = p.cumsum(-1)
    u = torch.tensor([_uniform(each.seed, draw) for each, draw in zip(params, draws)], device=p.device)
    chosen = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
    last = (p > 0).sum(-1, keepdim=True) - 1
    return order.gather(1, chosen.minimum(last.clamp(min=0)))[:, 0]


def _uniform(seed: int, draw: Draw) -> float:
    """A random number in [0, 1) that depends on the arguments alone, from a counter-based generator."""
    # from a list with a large number NumPy would make floats
    counter = np.array([0, draw.answer, draw.key, draw.step], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=seed, counter=counter)).random(dtype=np.float32))


def score_rows(logits: Tensor, targets: Tensor) -> tuple[list[float], list[int]]:
    """For each row of logits (B, V), the log-probability of its target (B,) in fp32, and the most likely token."""
    logprobs = []
    greedy = []
    for rows, target in zip(logits.split(SAMPLE_ROWS), targets.to(logits.device).split(SAMPLE_ROWS)):
        tokens, sums = maxima(rows)
        logprobs += (_logits_of(rows, target) - sums).tolist()
        greedy += tokens.tolist()
    return logprobs, greedy


def _logits_of(rows: Tensor, tokens: Tensor) -> Tensor:
    """The logits (B,) in fp32 of one of `tokens` (B,) for each row (B, V)."""
    return rows.gather(1, tokens[:, None])[:, 0].float()
