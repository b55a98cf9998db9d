"""How long a job takes under a policy, on hardware as profiled.

The model follows the engine: per layer, compute and the transfer queues run beside each other, and the slowest decides
(FlexGen, arXiv 2303.06865, section 4.3, with this engine's queues). Several devices add up, since a pass goes through
one after the other; each has links of its own, as fast as those of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import NamedTuple

from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.planning.layer_cost import LayerCost, Part
from h2o_flexgen.planning.occupancy import expected, stretches
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.shapes import DECODER, Shapes
from h2o_flexgen.planning.traffic import Amount, Flows, Offloaded, weights_beside
from h2o_flexgen.planning.workload import Batch, batches_of, group_rows, matmul_rows
from h2o_flexgen.policy import Policy

#: the most full blocks of a job that are costed
_MOST_BLOCKS = 32
#: indices of the phases of a block
_PREFILL = 0
_DECODE = 1


@dataclass
class Prediction:
    """What a policy costs.

    Attributes:
        prefill_seconds, decode_seconds: of the first, full block.
        job_prefill_seconds, job_decode_seconds: of all blocks.
        block_size: prompts of the first block.
        gen_len: tokens of the average output.
        busy: (resource, seconds) in the longer phase of the first block, the busiest first.
    """

    prefill_seconds: float
    decode_seconds: float
    job_prefill_seconds: float
    job_decode_seconds: float
    block_size: int
    gen_len: float
    num_prompts: int
    busy: list[tuple[str, float]]

    @property
    def block_seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def job_seconds(self) -> float:
        return self.job_prefill_seconds + self.job_decode_seconds

    @property
    def block_tokens_per_s(self) -> float:
        return self.block_size * self.gen_len / self.block_seconds

    @property
    def tokens_per_s(self) -> float:
        """Of the whole job."""
        return self.num_prompts * self.gen_len / self.job_seconds

    @property
    def bound_by(self) -> str:
        """The resource that is busy longest."""
        return self.busy[0][0]

    def of_job(self) -> dict[str, float | str]:
        """For a report, as plain data."""
        return {
            "prefill_seconds": self.job_prefill_seconds,
            "decode_seconds": self.job_decode_seconds,
            "tokens_per_s": self.tokens_per_s,
            "bound_by": self.bound_by,
        }


class Phase(NamedTuple):
    """Prefill, or the decode steps, of a block."""

    passes: float  # through all layers
    flows: Callable[[Policy, Sequence[Batch], Part], Flows]  # what runs at the same time in the layers of a part
    head_seconds: Amount  # of one pass


class PhaseCost(NamedTuple):
    """Seconds of a phase, and for how many of them each resource is busy."""

    seconds: float
    busy: Counter[str]


class CostModel:
    """Costs policies for one model, length of outputs and machine.

    Attributes:
        streamed_bytes: bytes in memory of the weights that a pass needs whole.
        steps: decode steps of the average row.
    """

    def __init__(self, profile: Profile, shapes: Shapes, gen_len: int):
        self.profile = profile
        self.shapes = shapes
        self.gen_len = gen_len
        mean_len = shapes.workload.mean_len
        self.steps = gen_len - 1 if mean_len is None else min(gen_len - 1, max(0.0, mean_len - 1))
        self.layers = LayerCost(profile, shapes, gen_len)
        self.streamed_bytes = sum(self.layers.layer_bytes)

    def phases(self, batches: Sequence[Batch], streamed: Amount = 0.0) -> list[Phase]:
        """Prefill and decode steps of a block. `streamed`: fraction of the head's weights that is not resident."""
        sizes = [batch.size for batch in batches]
        prefill_head = self.layers.head_seconds(sizes, streamed)
        decode_head = self.layers.head_seconds(matmul_rows(sizes, group_rows(self.shapes.spec)), streamed)
        return [Phase(1, self.layers.prefill, prefill_head), Phase(self.steps, self.layers.decode, decode_head)]

    def predict(
        self,
        policy: Policy,
        placement: Placement,
        prompt_lens: Sequence[int],
        lengths: Sequence[int] | None = None,
        shared: float | None = None,
    ) -> Prediction:
        """The time of a job, and of its first block.

        Args:
            prompt_lens: the longest first.
            lengths: tokens of the outputs, in the order in which rows run; None: as the workload expects them.
            shared: fraction of the prompts' tokens computed with another prompt; None: as the workload expects it.
        """
        if shared is not None:
            work = self.shapes.workload
            work = replace(work, shared=int(shared * sum(work.prompt_lens)))
            model = CostModel(self.profile, replace(self.shapes, workload=work), self.gen_len)
            return model.predict(policy, placement, prompt_lens, lengths)
        count = len(prompt_lens)
        if lengths is None:
            lengths = expected(count, self.gen_len, self.shapes.workload.mean_len)
        costs = _PlacedCost(self, policy, placement)
        size = min(policy.block_size, count)
        prefill, decode = costs.block(batches_of(policy, prompt_lens[:size]))
        longer = decode if decode.seconds >= prefill.seconds else prefill
        if min(min(lengths), self.steps + 1) < self.gen_len:
            gen_len = sum(lengths) / len(lengths)
            job = costs.refilled(prompt_lens, lengths)
        else:
            gen_len = float(self.gen_len)
            job = costs.block_by_block(prompt_lens)
        return Prediction(prefill.seconds, decode.seconds, *job, size, gen_len, count, longer.busy.most_common())

    def least_free(self, policy: Policy, prompt_len: int, prediction: Prediction) -> int:
        """How many places should be free before rows enter: matmuls of few tokens are slow, and a free place is wasted.

        If n rows enter at a time, slow matmuls cost each s / n seconds. With rows that live for `life` passes of t
        seconds, a place is free for n life / (2 places) passes on average, each worth t / places. The sum of both is
        least at n = places sqrt(2 s / (life t)). Prompts that join the matmuls of a decode step cost nothing extra.
        """
        if self.steps <= 0 or prompt_len <= group_rows(self.shapes.spec):
            return 1
        most = max(policy.prefill_tokens, prompt_len)
        alone = self.layers.matmul_seconds(DECODER, prompt_len) / prompt_len
        together = self.layers.matmul_seconds(DECODER, most) / most
        slowness = self.shapes.spec.layers * prompt_len * max(0.0, alone - together)
        places = prediction.block_size
        best = places * sqrt(2 * slowness / prediction.decode_seconds)
        return max(1, min(round(best), places // 4))


class _PlacedCost:
    """Costs of passes under one policy and placement."""

    def __init__(self, model: CostModel, policy: Policy, placement: Placement):
        self.model = model
        self.policy = policy
        self.placement = placement
        self.links = model.profile.links
        layers = model.layers
        self.weights = []  # of each layer, off the device
        for names in layers.matrices:
            self.weights.append(_offloaded((placement.weights[name], model.shapes.nbytes(name)) for name in names))
        staged = self.weights
        in_slices = Offloaded()
        if placement.sliced is not None:  # the head is read while it is computed
            in_slices = Offloaded(0.0, model.shapes.nbytes(placement.sliced))
            staged = [*staged[:-1], Offloaded(staged[-1].cpu, staged[-1].disk - in_slices.disk)]
        *self.beside_decoders, beside_head = weights_beside(staged)
        self.beside_head = beside_head + in_slices
        self.streamed = [sum(each) / nbytes for each, nbytes in zip(self.weights, layers.layer_bytes)]
        self._blocks: dict[tuple[Batch, ...], list[PhaseCost]] = {}

    def block(self, batches: tuple[Batch, ...]) -> list[PhaseCost]:
        """Prefill and decode steps of a full block."""
        if batches not in self._blocks:
            parts = self._parts(batches)
            phases = self.model.phases(batches, self.streamed[-1])
            self._blocks[batches] = [self._phase(phase, batches, parts) for phase in phases]
        return self._blocks[batches]

    def _phase(self, phase: Phase, batches: tuple[Batch, ...], parts: Counter[Part]) -> PhaseCost:
        layers = self.model.layers
        flows = [(count, phase.flows(self.policy, batches, part)) for part, count in parts.items()]
        head = phase.head_seconds + layers.conversion(self.beside_head)
        flows.append((1, Flows(head, layers.weight_traffic(self.beside_head))))
        seconds = 0.0
        busy: Counter[str] = Counter()
        for count, each in flows:
            passes = count * phase.passes
            seconds += passes * max(each.bounds(self.links, self.policy.overlap))
            for resource, value in each.busy(self.links).items():
                busy[resource] += passes * value
        return PhaseCost(seconds, busy)

    def _parts(self, batches: tuple[Batch, ...]) -> Counter[Part]:
        """What each decoder layer has off the device: {part: layers that are alike}."""
        sizes = [batch.size for batch in batches]
        activations = _offloaded(zip(self.placement.activations, sizes))
        parts: Counter[Part] = Counter()
        for layer, weights in enumerate(self.beside_decoders):
            caches = _offloaded((self.placement.cache[layer, k], size) for k, size in enumerate(sizes))
            parts[Part(weights, self.streamed[layer], caches, activations)] += 1
        return parts

    def block_by_block(self, prompt_lens: Sequence[int]) -> tuple[float, float]:
        """Seconds of prefill and decode where all rows of a block end together; of many full blocks, from a sample."""
        size = min(self.policy.block_size, len(prompt_lens))
        full, rest = divmod(len(prompt_lens), size)
        costed = range(0, full, ceil(full / _MOST_BLOCKS))
        blocks = [(full / len(costed), n) for n in costed]
        if rest:
            blocks.append((1, full))
        prefill_seconds = 0.0
        decode_seconds = 0.0
        for times, n in blocks:
            prefill, decode = self.block(batches_of(self.policy, prompt_lens[n * size : (n + 1) * size]))
            prefill_seconds += times * prefill.seconds
            decode_seconds += times * decode.seconds
        return prefill_seconds, decode_seconds

    def refilled(self, prompt_lens: Sequence[int], lengths: Sequence[int]) -> tuple[float, float]:
        """Seconds of prefill and decode where rows take the places of those that have ended."""
        places = min(self.policy.block_size, len(prompt_lens))
        mean_len = ceil(sum(prompt_lens) / len(prompt_lens))
        weights = self.model.layers.weight_traffic(sum(self.weights, Offloaded()))
        weights_seconds = max(Flows(0.0, weights).bounds(self.links, self.policy.overlap))
        prefill_seconds = 0.0
        decode_seconds = 0.0
        for passes, decoding, entering in stretches(lengths, places):
            prefill = self._pass_seconds(_PREFILL, entering, mean_len)
            decode = self._pass_seconds(_DECODE, decoding, mean_len)
            alone = prefill + decode
            both = alone
            if prefill > 0 and decode > 0:  # what streams is fetched once for both
                both = max(alone - weights_seconds, prefill, decode)
            prefill_seconds += passes * both * prefill / alone
            decode_seconds += passes * both * decode / alone
        return prefill_seconds, decode_seconds

    def _pass_seconds(self, phase: int, rows: float, prompt_len: int) -> float:
        """Seconds of one pass with `rows` rows on average in a phase, given by its index."""
        count = max(1, round(rows))
        batches = batches_of(self.policy, [prompt_len] * count)
        one_pass = self.model.phases(batches)[phase]._replace(passes=1)
        return rows / count * self._phase(one_pass, batches, self._parts(batches)).seconds


def _offloaded(sizes: Iterable[tuple[str, int]]) -> Offloaded:
    """`sizes`: (tier, bytes or sequences)."""
    sums = {"gpu": 0, "cpu": 0, "disk": 0}
    for tier, size in sizes:
        sums[tier] += size
    return Offloaded(sums["cpu"], sums["disk"])
