"""Every system of the comparison, one a file, each with `run(job) -> dict`: seconds of `prefill` and `decode`, and the
`lowest_tier` (GPU, RAM, disk) that it read from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """A column of the table: its module here, the package it needs, and whether it is ours."""

    module: str
    package: str
    h2o: bool = False

    @property
    def is_ours(self) -> bool:
        return self.module == "ours"


SYSTEMS = {
    "transformers": System("transformers", "transformers"),
    "Accelerate": System("accelerate", "accelerate"),
    "ZeRO-Inference": System("zero_inference", "deepspeed"),
    "FlexGen": System("flexgen", "flexgen"),
    "ours, full cache": System("ours", "h2o_flexgen"),
    "ours, H2O": System("ours", "h2o_flexgen", h2o=True),
}
