"""What was measured of a job."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from h2o_flexgen.policy import Policy


@dataclass(frozen=True)
class BytesMoved:
    """Bytes on each link between tiers."""

    disk_to_cpu: int = 0
    cpu_to_gpu: int = 0
    gpu_to_cpu: int = 0
    cpu_to_disk: int = 0

    def __add__(self, other: BytesMoved) -> BytesMoved:
        return BytesMoved(*(a + b for a, b in zip(self._counts, other._counts)))

    def __sub__(self, other: BytesMoved) -> BytesMoved:
        return BytesMoved(*(a - b for a, b in zip(self._counts, other._counts)))

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.disk_to_cpu, self.cpu_to_gpu, self.gpu_to_cpu, self.cpu_to_disk


@dataclass(frozen=True)
class PerTier:
    """Bytes of each tier."""

    gpu: int
    cpu: int
    disk: int


@dataclass(frozen=True)
class JobSize:
    """`prompt_len`: tokens of the longest prompt; `gen_len`: output tokens asked for, per prompt."""

    num_prompts: int
    prompt_len: int
    gen_len: int


@dataclass(frozen=True)
class Slots:
    """The KV budget of a sequence, per layer and KV head."""

    heavy: int
    recent: int


@dataclass(frozen=True)
class Phase:
    """Prefill, whose tokens are those of the prompts, or decode, whose tokens are the generated ones but the first of
    each sequence, which prefill gives."""

    seconds: float
    tokens_per_s: float
    bytes_moved: BytesMoved


@dataclass(frozen=True)
class Total:
    """Prefill and decode together; loading is left out, as FlexGen counts it."""

    seconds: float
    generated_tokens: int
    tokens_per_s: float


@dataclass(frozen=True)
class Stalls:
    """Seconds that compute waited for weights, and for cache and hidden states."""

    weights: float
    cache: float


@dataclass(frozen=True)
class Report:
    """A job as it was run and measured.

    Attributes:
        kv_budget: None for a full cache.
        peak_memory_bytes: the most that was held of each tier; planned_memory_bytes: that the plan counted.
        bytes_moved: of the whole job.
        predicted: times of the job by the cost model, as `planning.cost.Prediction.of_job` gives them; None if this
            machine has not been measured.
    """

    model: str
    device: str
    dtype: str
    workload: JobSize
    policy: Policy
    kv_budget: Slots | None
    prefill: Phase
    decode: Phase
    total: Total
    peak_memory_bytes: PerTier
    planned_memory_bytes: PerTier
    bytes_moved: BytesMoved
    stall_seconds: Stalls
    predicted: dict[str, float | str] | None = None

    def to_dict(self) -> dict:
        """As plain data for JSON; without `predicted` if there is no prediction."""
        found = asdict(self)
        if self.predicted is None:
            del found["predicted"]
        return found


def rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
