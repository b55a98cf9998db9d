"""A sink for sequences that are not continued: hidden states are pooled, and answers scored."""

from __future__ import annotations

import math
from collections import Counter
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.engine.batch import PromptPiece, Sequence
from h2o_flexgen.engine.pooling import Pooled
from h2o_flexgen.engine.prefixes import Node, nodes_of
from h2o_flexgen.engine.step import LogitsSink
from h2o_flexgen.kernels.rowwise import maxima
from h2o_flexgen.planning.workload import SAMPLE_ROWS


class TaskSink:
    """A sink that fulfils the `task` of each sequence in its one pass.

    Args:
        sampler: receives the logits of sequences without a task; None if there are none.
    """

    def __init__(self, sampler: LogitsSink | None = None):
        self.sampler = sampler
        self._sums: WeakKeyDictionary[Node, Tensor] = WeakKeyDictionary()  # (W,) of the states of a node's own tokens

    def expect(self, rows: list[Sequence], at_once: bool) -> None:
        """As `step.LogitsSink`."""
        if self.sampler is not None:
            self.sampler.expect(rows, at_once)

    def take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """As `step.LogitsSink`. A sequence with log-probabilities that are not finite ends with an error."""
        scored = [n for n, s in enumerate(sequences) if s.task is not None]
        if not scored:
            self.sampler.take(sequences, logits)
        elif len(scored) == len(sequences):
            _score(sequences, logits)
        else:
            others = [n for n, s in enumerate(sequences) if s.task is None]
            self.sampler.take([sequences[n] for n in others], logits[others])
            _score([sequences[n] for n in scored], logits[scored])

    def take_states(self, piece: PromptPiece, states: Tensor) -> None:
        """As `step.StatesSink`. A sequence with states that are not finite ends with an error."""
        pooled = []
        vectors = []
        for row, own in zip(piece.rows, states.split([len(text) for text in piece.texts])):
            if isinstance(row, Node):
                self._sums[row] = own.sum(0, dtype=torch.float32)
            elif isinstance(row.task, Pooled):
                pooled.append(row)
                vectors.append(self._vector(row, own))
        if pooled:
            _finish(pooled, torch.stack(vectors).cpu())

    def _vector(self, s: Sequence, own: Tensor) -> Tensor:
        """The vector (W,) in fp32 of a sequence from the states (n, W) of the tokens that it shares with no other."""
        if s.task.params.pooling == "last":
            vector = own[-1].float()
        else:
            shared = [self._sums[node] for node in nodes_of(s)]
            vector = sum(shared, own.sum(0, dtype=torch.float32)) / len(s.prompt)
        return F.normalize(vector, dim=0) if s.task.params.normalize else vector


def _finish(pooled: list[Sequence], vectors: Tensor) -> None:
    """End sequences with their vectors (B, W)."""
    finite = vectors.isfinite().all(1).tolist()
    for s, vector, is_finite in zip(pooled, vectors.numpy(), finite):
        s.task.embedding = vector.copy() if is_finite else None
        s.finish_reason = "length" if is_finite else "error"


def _score(sequences: list[Sequence], logits: Tensor) -> None:
    """Score the next targets of sequences, by logits (B, V); a sequence may be listed several times."""
    asked = Counter()
    targets = []
    for s in sequences:
        targets.append(s.task.targets[len(s.task.logprobs) + asked[s]])
        asked[s] += 1
    for s, tokens, logprobs in zip(sequences, targets, target_logprobs(logits, targets)):
        s.task.logprobs.append(dict(zip(tokens, logprobs)))
        if not all(map(math.isfinite, logprobs)):
            s.finish_reason = "error"
        elif len(s.task.logprobs) == len(s.task.targets):
            s.finish_reason = s.finish_reason or "length"


def target_logprobs(logits: Tensor, targets: list[list[int]]) -> list[list[float]]:
    """For each row of logits (B, V), the log-probabilities of its targets in fp32."""
    counts = torch.tensor([len(tokens) for tokens in targets])
    rows = torch.arange(len(logits)).repeat_interleave(counts).to(logits.device)
    tokens = torch.tensor([token for row in targets for token in row], device=logits.device)
    sums = torch.cat([maxima(part)[1] for part in logits.split(SAMPLE_ROWS)])
    found = logits[rows, tokens].float() - sums[rows]
    return [part.tolist() for part in found.cpu().split(counts.tolist())]
