"""Sinks of logits: one samples tokens, the other scores given texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.engine.stop import StopStrings, decode
from h2o_flexgen.kernels.rowwise import maxima
from h2o_flexgen.planning.workload import SAMPLE_ROWS

#: at lower temperatures sampling is greedy, and dividing by them would overflow
GREEDY_BELOW = 1e-6


class Sampler:
    """A sink of logits that samples a token for each sequence that still runs, by its own parameters.

    Args:
        eos_ids: token ids that end a sequence, unless its parameters ignore them; its `stop_token_ids` always do.
        tokenizer: for stop strings; None if no sequence has any.
    """

    def __init__(self, eos_ids: frozenset[int], tokenizer=None):
        self.eos_ids = eos_ids
        self.stop_strings = StopStrings(tokenizer)

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`. A sequence with logits that are not finite ends with an error."""
        draws = [(s.key, len(s.tokens)) for s in sequences]
        tokens, logprobs = sample(logits, [s.params for s in sequences], draws)
        for s, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist()):
            if s.append(token, logprob):
                self._end(s)

    def _end(self, s: Sequence) -> None:
        """Set `finish_reason` if the newest token ends the sequence."""
        token = s.tokens[-1]
        is_end = token in s.params.stop_token_ids or (token in self.eos_ids and not s.params.ignore_eos)
        if s.params.stop:
            s.text = self.stop_strings.text_before(s.tokens, s.params.stop)
        if is_end and s.text is not None:
            # a stop string may begin inside the text of the last token, which is left out
            s.text = min(s.text, decode(self.stop_strings.tokenizer, s.tokens[:-1]), key=len)
        if is_end or s.text is not None:
            s.finish_reason = "stop"
        elif len(s.tokens) == s.params.max_tokens:
            s.finish_reason = "length"


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
        self.greedy_token_ids: dict[int, list[int]] = defaultdict(list)

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`."""
        targets = [next(self._next[s.index]) for s in sequences]
        logprobs, greedy = score_rows(logits, torch.tensor(targets))
        for s, target, logprob, token in zip(sequences, targets, logprobs, greedy):
            if s.append(target, logprob):
                self.greedy_token_ids[s.index].append(token)
                if len(s.tokens) == len(self.targets[s.index]):
                    s.finish_reason = "length"


def sample(logits: Tensor, params: list[SamplingParams], draws: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Choose one token per row, each by its own parameters.

    Args:
        logits: (B, V) of any float type.
        params: of each of the B rows.
        draws: (key below 2**64, tokens that the row has generated) of each row. They and the seed alone decide its
            random number, whatever its batch, its neighbours and the pass.

    Returns:
        tokens (B,) int64, and their log-probabilities under the model (B,) fp32, NaN where a row's logits are
        broken. Both on the CPU.
    """
    chosen = []
    logprobs = []
    # a few rows at a time, which stay in the CPU's caches, take half the time
    for at in range(0, len(logits), SAMPLE_ROWS):
        rows = logits[at : at + SAMPLE_ROWS]
        tokens, sums = maxima(rows)
        for group in _groups(params[at : at + SAMPLE_ROWS]):
            group_params = [params[at + row] for row in group]
            group_draws = [draws[at + row] for row in group]
            tokens[group] = _draw(rows[group].float() / group_params[0].temperature, group_params, group_draws)
        chosen.append(tokens)
        logprobs.append(_logits_of(rows, tokens) - sums)
    return torch.cat(chosen).cpu(), torch.cat(logprobs).cpu()


def _groups(params: list[SamplingParams]) -> Iterable[list[int]]:
    """The rows that are not greedy, in groups with the same temperature, top_k and top_p."""
    groups = defaultdict(list)
    for row, p in enumerate(params):
        if p.temperature >= GREEDY_BELOW:
            groups[p.temperature, p.top_k, p.top_p].append(row)
    return groups.values()


def _draw(logits: Tensor, params: list[SamplingParams], draws: list[tuple[int, int]]) -> Tensor:
    """Draw a token for each row of logits (B, V), which have been divided by the temperature."""
    top_k = params[0].top_k
    top_p = params[0].top_p
    if 0 < top_k < logits.shape[1]:
        order = logits.topk(top_k).indices
        logits = logits.gather(1, order)
    else:
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
    p = torch.softmax(logits, -1)
    before = p.cumsum(-1) - p
    p = p.masked_fill(before >= top_p, 0.0)  # the most likely token always stays
    cumulative = p.cumsum(-1)
    u = torch.tensor([_uniform(each.seed, *draw) for each, draw in zip(params, draws)], device=p.device)
    chosen = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
    last = (p > 0).sum(-1, keepdim=True) - 1
    return order.gather(1, chosen.minimum(last.clamp(min=0)))[:, 0]


def _uniform(seed: int, key: int, step: int) -> float:
    """A random number in [0, 1) that depends on the arguments alone, from a counter-based generator."""
    counter = np.array([0, 0, key, step], np.uint64)  # from a list with a large number NumPy would make floats
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
