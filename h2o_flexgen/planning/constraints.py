"""What the user fixes or demands of a policy, and a search may not change."""

from __future__ import annotations

from dataclasses import dataclass, replace

from h2o_flexgen.errors import UserError
from h2o_flexgen.planning.budget import MIN_HH_RATIO
from h2o_flexgen.planning.losses import Losses
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import Policy

#: micro-batches that are tried: large enough for matmuls to reach their full rate
PREFILL_TOKENS = (Policy.prefill_tokens, 512)


@dataclass(frozen=True)
class Constraints:
    """Limits on the choice of a policy.

    Attributes:
        gpu_batch_size, num_gpu_batches, cpu_cache_compute, prefill_tokens: of the policy; None leaves it to the search.
        overlap: of the policy.
        max_latency: the most seconds a block may take.
        min_hh_ratio: the smallest ratio for the KV budget "auto".
        losses: quality measurements that restrict the KV budget "auto".
        resident: skip the search if everything fits on the compute device and larger blocks would not be faster.
        one_block: count one full block, whatever the number of prompts.

    Raises:
        UserError: `max_latency` is not above 0.
    """

    gpu_batch_size: int | None = None
    num_gpu_batches: int | None = None
    cpu_cache_compute: bool | None = None
    prefill_tokens: int | None = None
    overlap: bool = True
    max_latency: float | None = None
    min_hh_ratio: float = MIN_HH_RATIO
    losses: Losses | None = None
    resident: bool = True
    one_block: bool = False

    def __post_init__(self):
        if self.max_latency is not None and not self.max_latency > 0:
            raise UserError(f"`max_latency` must be more than 0 s, not {self.max_latency}")

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The values of `prefill_tokens` to try, largest first."""
        return PREFILL_TOKENS if self.prefill_tokens is None else (self.prefill_tokens,)

    def planned(self, workload: Workload, policy: Policy) -> Workload:
        """The part of a workload that memory and seconds are counted for."""
        return replace(workload, prompt_lens=workload.prompt_lens[: policy.block_size]) if self.one_block else workload
