"""The rows of the comparison: a model, a memory cap, the lengths of a job, and the systems that run it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.common import GIB

#: heavy + recent slots over prompt + output, as the H2O paper counts
BUDGET = 0.2
#: GiB of a GPU that is sold as 16 GB
GPU_CAP = 14.9
#: after a GGUF type: the router of a random checkpoint prefers some experts
SKEWED = "skewed"
#: the demo's real model, a GGUF file of type DEMO_KIND
DEMO = "SmolLM2-135M"
DEMO_KIND = "Q4_1"


@dataclass(frozen=True)
class System:
    """A system that runs a row.

    Attributes:
        module: its module in bench.systems.
        flags: for ours, options of `h2o-flexgen generate`; {hh_ratio} is replaced by the row's.
        kind: of the checkpoint, "safetensors" or a GGUF type, maybe with a word for its router.
        avx2: as on a CPU that has AVX2 alone.
    """

    module: str
    flags: str = ""
    kind: str = "safetensors"
    avx2: bool = False

    @property
    def is_ours(self) -> bool:
        return self.module == "ours"


H2O = "--kv-rule h2o --hh-ratio {hh_ratio:g}"
INT8 = "--compute int8"
PEERS = {"Accelerate": System("accelerate"), "ZeRO-Inference": System("zero_inference")}
OURS = {
    "ours, full cache": System("ours"),
    "ours, H2O": System("ours", H2O),
    "ours, H2O + int8": System("ours", f"{H2O} {INT8} --compress-weight int8 --compress-cache int8"),
    "ours, H2O + int4": System("ours", f"{H2O} --compress-weight int4 --compress-cache int4"),
    "ours, H2O + int4, int8 matmuls": System("ours", f"{H2O} {INT8} --compress-weight int4 --compress-cache int4"),
}
#: the column of our systems with int8 or int4
QUANTISED = "ours, 8 or 4 bits"
#: on a GGUF file, whose weights stream in their stored format
STORED = {
    "ours, full cache": System("ours"),
    "ours, full cache, int8 matmuls": System("ours", INT8),
    "ours, H2O": System("ours", H2O),
    "ours, H2O, int8 matmuls": System("ours", f"{H2O} {INT8}"),
    "ours, H2O + int8": System("ours", f"{H2O} {INT8} --compress-cache int8"),
}


def on_gguf(kind: str, systems: dict[str, System]) -> dict[str, System]:
    """The same systems on a GGUF file; its type is appended to their names."""
    return {f"{name} {kind}": replace(system, kind=kind) for name, system in systems.items()}


def column(system: str) -> str:
    """The table column of a system: its name without the GGUF type; all of ours that quantise share one, and llama.cpp
    with any number of sequences."""
    if system.startswith("llama.cpp"):
        return "llama.cpp"
    if system.startswith("ours") and "int" in system:
        return QUANTISED
    kind = system.split()[-1]
    return system.removesuffix(f" {kind}") if kind.startswith(("Q", "MXFP")) else system


OF_GGUF = {"llama.cpp": System("llama_cpp"), **STORED}
OPT = PEERS | OURS
LLAMA_1B = {"Accelerate": PEERS["Accelerate"], **on_gguf("Q4_0", OF_GGUF), **on_gguf("Q8_0", OF_GGUF)}
LLAMA_8B = {"Accelerate": PEERS["Accelerate"], **on_gguf("Q4_0", OF_GGUF)}
LLAMA_8B_K = on_gguf("Q4_K_M", OF_GGUF)
#: a mixture of experts larger than RAM. llama.cpp also with few sequences, as people run it
EXPERTS = {
    "llama.cpp": System("llama_cpp"),
    "llama.cpp, 32 sequences": System("llama_cpp"),
    "ours, full cache + int8, int8 matmuls": System("ours", f"{INT8} --compress-cache int8"),
    "ours, H2O + int8": System("ours", f"{H2O} {INT8} --compress-cache int8"),
}
OURS_ON_EXPERTS = EXPERTS["ours, H2O + int8"]
#: ours, also as on a CPU that has AVX2 alone, and with a router that prefers some experts
EXPERTS_APART = {
    "ours, H2O + int8 Q4_0": replace(OURS_ON_EXPERTS, kind="Q4_0"),
    "ours, H2O + int8, AVX2 alone Q4_0": replace(OURS_ON_EXPERTS, kind="Q4_0", avx2=True),
    "ours, H2O + int8 Q4_0 skewed": replace(OURS_ON_EXPERTS, kind=f"Q4_0 {SKEWED}"),
}
SMOLLM2 = on_gguf(DEMO_KIND, {"transformers": System("transformers"), **OF_GGUF})


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        cap: GiB of RAM including page cache, or of GPU memory with CUDA; None for no cap.
        prompts: number of prompts in our job.
        limit: seconds after which a run counts as dead, since a program over its cap may thrash.
    """

    model: str
    cap: float | None
    prompt_len: int
    gen_len: int
    prompts: int
    systems: dict[str, System]
    device: str = "cpu"
    runs: int = 3
    limit: int = 900

    @property
    def dtype(self) -> str:
        """Of the checkpoint, and of peers whose settings name no other."""
        return "float16" if self.device == "cuda" else "bfloat16"

    @property
    def hh_ratio(self) -> float:
        """Heavy slots, and equally many recent ones, over prompt tokens, so that both are BUDGET of all tokens."""
        return BUDGET / 2 * (self.prompt_len + self.gen_len) / self.prompt_len

    def cap_bytes(self, device: str) -> int | None:
        """The cap on a device's memory, if the row has one."""
        return int(self.cap * GIB) if self.cap is not None and device == self.device else None

    def job(self) -> dict:
        """The description that results contain."""
        fields = ("model", "prompt_len", "gen_len", "device", "dtype", "hh_ratio", "prompts")
        return {name: getattr(self, name) for name in fields} | {"cap_gib": self.cap}


ON_CPU = {
    # short prompts, since on two cores long ones would measure little but prefill
    "opt-1.3b 64+256": Row("facebook/opt-1.3b", 1.5, 64, 256, 96, OPT),
    "opt-6.7b 64+64": Row("facebook/opt-6.7b", 8, 64, 64, 64, OPT),
    "llama-1b 128+128": Row("meta-llama/Llama-3.2-1B", 1, 128, 128, 64, LLAMA_1B),
    "llama-1b 128+128 uncapped": Row("meta-llama/Llama-3.2-1B", None, 128, 128, 64, LLAMA_1B),
    "llama-1b 128+128 Q8_0": Row("meta-llama/Llama-3.2-1B", 1, 128, 128, 64, on_gguf("Q8_0", OF_GGUF)),
    "llama-8b 64+64": Row("meta-llama/Llama-3.1-8B", 3, 64, 64, 64, LLAMA_8B),
    "llama-8b 64+64 Q4_K_M": Row("meta-llama/Llama-3.1-8B", 3, 64, 64, 64, LLAMA_8B_K),
    "qwen3-30b 32+32 Q4_0": Row("Qwen/Qwen3-30B-A3B", 8, 32, 32, 512, on_gguf("Q4_0", EXPERTS), runs=1, limit=1800),
    "qwen3-30b 8+8 Q4_0": Row("Qwen/Qwen3-30B-A3B", 8, 8, 8, 512, EXPERTS_APART, runs=1),
    "gpt-oss-20b 32+32 MXFP4": Row("openai/gpt-oss-20b", 6, 32, 32, 512, on_gguf("MXFP4", EXPERTS), runs=1, limit=1800),
    "smollm2 512+64": Row(DEMO, None, 512, 64, 64, SMOLLM2),
}


def on_gpu(row: Row, **changes) -> Row:
    """A row on a capped GPU: with FlexGen for OPT, and without llama.cpp, which is built for the CPU."""
    flexgen = {"FlexGen": System("flexgen")} if "opt" in row.model else {}
    systems = {name: s for name, s in (flexgen | row.systems).items() if s.module != "llama_cpp"}
    return replace(row, device="cuda", cap=GPU_CAP, systems=systems, **changes)


ROWS = {
    **ON_CPU,
    **{f"cuda {name}": on_gpu(row) for name, row in ON_CPU.items() if "uncapped" not in name},
    # from the H2O paper, which used a GPU of 16 GB
    "cuda opt-6.7b 512+32": on_gpu(ON_CPU["opt-6.7b 64+64"], prompt_len=512, gen_len=32, prompts=64),
    "cuda opt-30b 512+32": on_gpu(
        ON_CPU["opt-6.7b 64+64"], model="facebook/opt-30b", prompt_len=512, gen_len=32, prompts=512, runs=1, limit=3600
    ),
    # to try the benchmark itself
    "tiny opt": Row("facebook/opt-125m", 1, 16, 8, 32, {"transformers": System("transformers"), **OPT}, runs=1),
    "tiny llama": Row("meta-llama/Llama-3.2-1B", 1, 16, 8, 16, LLAMA_1B, runs=1),
}


def file_name(name: str) -> str:
    """Name of a row's result file."""
    return f"throughput_{name.replace(' ', '_').replace('+', '_')}"


def setting_text(setting: dict) -> str:
    """A system's batch and options, and its output tokens if they are fewer than the row's."""
    tokens = f" gen_len {setting['gen_len']}" if "gen_len" in setting else ""
    options = "".join(f" {name} {value}" for name, value in setting.get("options", {}).items())
    return f"batch {setting['batch']}{options}{tokens}"
