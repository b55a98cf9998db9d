"""The jobs of the comparison: a model, lengths, and a cap on memory."""

from __future__ import annotations

from dataclasses import dataclass

#: heavy + recent slots over prompt + output, as the H2O paper counts
BUDGET = 0.2
#: GiB of a GPU that is sold as 16 GB
GPU_CAP = 14.9
GIB = 1 << 30

ON_CPU = ("transformers", "Accelerate", "ZeRO-Inference", "ours, full cache", "ours, H2O")
#: plain transformers only pages a model that does not fit: shown in the short rows
OFFLOADING = ON_CPU[1:]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        cap: GiB of RAM, or of the GPU with CUDA; None: all there is.
        prompts: of our job.
        limit: seconds after which a run counts as dead: a program over its cap may thrash.
    """

    model: str
    prompt_len: int
    gen_len: int
    cap: float | None
    prompts: int
    device: str = "cpu"
    systems: tuple[str, ...] = ON_CPU
    runs: int = 3
    limit: int = 10800

    @property
    def dtype(self) -> str:
        return "float16" if self.device == "cuda" else "bfloat16"

    @property
    def kv_budget(self) -> list[int]:
        """Heavy and recent slots."""
        slots = round(BUDGET * (self.prompt_len + self.gen_len))
        return [slots // 2, slots - slots // 2]

    def cap_bytes(self, device: str) -> int | None:
        """Of a device's memory, if the row caps it."""
        return int(self.cap * GIB) if self.cap is not None and device == self.device else None

    def job(self) -> dict:
        """As results describe it."""
        fields = ("model", "prompt_len", "gen_len", "device", "dtype", "kv_budget")
        return {name: getattr(self, name) for name in fields} | {"cap_gib": self.cap}


ROWS = {
    # short prompts: on two cores long ones would measure prefill alone
    "1.3b 32+32": Row("facebook/opt-1.3b", 32, 32, 1.5, 128),
    "1.3b 128+128": Row("facebook/opt-1.3b", 128, 128, 1.5, 128),
    "1.3b 64+512": Row("facebook/opt-1.3b", 64, 512, 1.5, 128, systems=OFFLOADING),
    "6.7b 64+256": Row("facebook/opt-6.7b", 64, 256, 8, 128, systems=OFFLOADING),
    "30b 64+32": Row("facebook/opt-30b", 64, 32, None, 256, systems=("Accelerate", "ours, H2O"), runs=1, limit=36000),
    **{
        f"cuda {size} 512+{gen}": Row(
            f"facebook/opt-{size}",
            512,
            gen,
            GPU_CAP,
            prompts,
            "cuda",
            systems=("Accelerate", "ZeRO-Inference", "FlexGen", "ours, full cache", "ours, H2O"),
        )
        for size, prompts in (("6.7b", 64), ("30b", 512))
        for gen in (32, 512, 1024)
    },
    # to try the benchmark itself
    "125m 16+8": Row("facebook/opt-125m", 16, 8, 1, 32),
}


def file_name(name: str) -> str:
    """Of a row's results."""
    return f"throughput_{name.replace(' ', '_').replace('+', '_')}"
