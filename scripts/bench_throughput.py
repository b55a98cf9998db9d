"""Throughput of h2o_flexgen, Hugging Face Accelerate, DeepSpeed ZeRO-Inference and transformers, side by side.

    python scripts/bench_throughput.py --list
    python scripts/bench_throughput.py --row "1.3b 32+32" --quick --system Accelerate --system "ours, H2O"

All systems run the same job (a random checkpoint, dtype, prompts, a fixed output length), each in a process of its own
inside the same memory cgroup, page cache included, after the page cache was dropped; loading is not counted. First each
peer's batch is doubled until it fails or slows down, then all take turns. Every run is added to
docs/benchmarks/throughput_ROW.json as soon as it ends, so that a benchmark that was stopped goes on where it was. Needs
root for the cgroup, and the packages of the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import bench_common as common
import torch
from bench_common import MemoryCap, median
from bench_systems import Job
from make_tables import throughput

from h2o_flexgen.models import opt
from h2o_flexgen.models.config import OPTConfig
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.checkpoint import DummyCheckpoint

GIB = 1 << 30
PEERS = ("accelerate", "deepspeed")
#: heavy + recent slots over prompt + output, as the H2O paper counts
BUDGET = 0.2
#: output tokens of the runs that look for a peer's best batch, and the sequences they start with
PROBE, START = 8, 16
#: other options of a peer are taken if they are so much faster
NOISE = 1.05
#: bytes of a shard of the checkpoint
SHARD = 1 << 30
#: seconds after which a run counts as failed: a program over its cap may thrash for ever
PROBE_LIMIT, RUN_LIMIT = 900, 10800

#: the table's name -> (bench_systems' name, the package it needs, options to try: the first while the batch grows)
SYSTEMS = {
    "transformers": ("transformers", "transformers", ({}, {"attention": "eager"})),
    "Accelerate": (
        "Accelerate",
        "accelerate",
        ({}, {"attention": "eager"}, {"share": 0.25}),
    ),
    "ZeRO-Inference": ("ZeRO-Inference", "deepspeed", ({}, {"attention": "eager"})),
    "ours, full cache": ("ours", "h2o_flexgen", ({},)),
    "ours, H2O": ("ours", "h2o_flexgen", ({"h2o": True},)),
}

#: plain transformers only pages a model that does not fit: shown in the short rows
OFFLOADING = tuple(s for s in SYSTEMS if s != "transformers")


@dataclass(frozen=True)
class Row:
    """One line of the matrix. `prompts`: of our job; `cap`: GiB of RAM, or of the card with CUDA; None: all."""

    model: str
    prompt_len: int
    gen_len: int
    cap: float | None
    prompts: int
    device: str = "cpu"
    systems: tuple[str, ...] = tuple(SYSTEMS)
    runs: int = 3


ROWS = {
    # short prompts: on two cores long ones would measure prefill alone
    "1.3b 32+32": Row("facebook/opt-1.3b", 32, 32, 1.5, 128),
    "1.3b 128+128": Row("facebook/opt-1.3b", 128, 128, 1.5, 128),
    "1.3b 64+512": Row("facebook/opt-1.3b", 64, 512, 1.5, 128, systems=OFFLOADING),
    "6.7b 64+256": Row("facebook/opt-6.7b", 64, 256, 8, 128, systems=OFFLOADING),
    "30b 64+32": Row(
        "facebook/opt-30b",
        64,
        32,
        None,
        256,
        systems=("Accelerate", "ours, H2O"),
        runs=1,
    ),
    **{
        f"cuda {size} 512+{gen}": Row(f"facebook/opt-{size}", 512, gen, 16, prompts, "cuda")
        for size, prompts in (("6.7b", 64), ("30b", 512))
        for gen in (32, 512, 1024)
    },
    # to try the script itself
    "125m 16+8": Row("facebook/opt-125m", 16, 8, 1, 32),
}


class Bench:
    """One row: runs systems, keeps what came of them in the row's file, and never does the same run twice.

    `quick`: a file of its own, made anew; every system at the batch and with the options that did best in
    docs/benchmarks, on whatever machine that was."""

    def __init__(self, name: str, row: Row, folder: Path, quick: bool = False):
        self.name, self.row, self.folder = name, row, folder
        known = f"throughput_{name.replace(' ', '_').replace('+', '_')}"
        self.known = common.stored(known) if quick else {}
        self.file = f"quick_{known}" if quick else known
        self.dtype = "float16" if row.device == "cuda" else "bfloat16"
        self.runs = [] if quick else common.kept(known, *PEERS).get("runs", [])
        self._taken: set[int] = set()
        self._built = False

    # one run

    def run(self, system: str, batch: int, gen_len: int, options: dict, limit: float) -> dict:
        """A run that was kept and not asked for yet, or a new one. "failed" in the result says why it died."""
        key = {"system": system, "batch": batch, "gen_len": gen_len, "options": options}
        for n, r in enumerate(self.runs):
            if n not in self._taken and {k: r[k] for k in key} == key:
                self._taken.add(n)
                return r
        run = key | self._in_a_process(system, batch, gen_len, options, limit)
        self._taken.add(len(self.runs))
        self.runs.append(run)
        what = run.get("failed") or f"{speed(run):.2f} tokens/s"
        print(
            f"{self.name}: {system}, batch {batch}, {gen_len} tokens {options or ''}: {what}",
            flush=True,
        )
        self.save()
        return run

    def _in_a_process(self, system: str, batch: int, gen_len: int, options: dict, limit: float) -> dict:
        row = self.row
        name, package, _ = SYSTEMS[system]
        if find_spec(package) is None:
            return {"failed": f"{package} is not installed"}
        if package == "deepspeed":
            self.build_operators()
        cap = None if row.cap is None else int(row.cap * GIB)
        job = Job(
            name,
            str(self.checkpoint),
            str(self.folder),
            self.dtype,
            row.device,
            row.prompt_len,
            gen_len,
            batch,
            gpu_bytes=cap if row.device == "cuda" else None,
            ram_bytes=cap if row.device == "cpu" else None,
            options=options | ({"hardware": str(self.profile)} if name == "ours" else {}),
            kv_budget=self.kv_budget if options.get("h2o") else None,
        )
        return self._finish(job, limit)

    def _finish(self, job: Job, limit: float) -> dict:
        """What a job in a process of its own comes to."""
        files = [self.folder / n for n in ("job.json", "result.json", "output.txt")]
        files[0].write_text(json.dumps(asdict(job)))
        files[1].unlink(missing_ok=True)
        drop_page_cache(Path(job.model))
        argv = [
            sys.executable,
            str(Path(__file__).with_name("bench_systems.py")),
            *map(str, files[:2]),
        ]
        with open(files[2], "w") as output, MemoryCap(job.ram_bytes) as memory_cap:
            try:
                done = memory_cap.run(argv, limit, stdout=output, stderr=subprocess.STDOUT)
            except subprocess.TimeoutExpired:
                return {"failed": f"no end after {limit:.0f} s"}
            peak = memory_cap.peak()
        if done.returncode:
            return {"failed": why(done.returncode, files[2].read_text(errors="replace"))}
        result = files[1].read_text().replace(str(self.folder), "SCRATCH")
        return json.loads(result) | {"cgroup_peak_bytes": peak}

    @property
    def kv_budget(self) -> list[int]:
        """(heavy, recent) slots."""
        slots = round(BUDGET * (self.row.prompt_len + self.row.gen_len))
        return [slots // 2, slots - slots // 2]

    @cached_property
    def checkpoint(self) -> Path:
        print(f"{self.name}: writing a random checkpoint", flush=True)
        return write_checkpoint(self.row.model, self.folder / "checkpoint", self.dtype)

    def build_operators(self) -> None:
        """DeepSpeed builds its operators when they are first used: before the clock runs, and outside the cap."""
        if self._built:
            return
        print(f"{self.name}: DeepSpeed's operators are built (minutes, once)", flush=True)
        model = write_checkpoint("facebook/opt-125m", self.folder / "small", self.dtype)
        job = Job("ZeRO-Inference", str(model), str(self.folder), self.dtype, self.row.device, 4, 2, 1)
        for tier in ("cpu", "nvme"):
            self._finish(replace(job, options={"offload": tier}), PROBE_LIMIT)
        self._built = True

    @cached_property
    def profile(self) -> Path:
        path = self.folder / "profile.json"
        argv = [
            sys.executable,
            "-m",
            "h2o_flexgen.hardware",
            "-o",
            str(path),
            "--dtype",
            self.dtype,
        ]
        subprocess.run([*argv, "--device", self.row.device], cwd=common.ROOT, check=True)
        return path

    # a peer at its best

    def best(self, system: str) -> tuple[int, dict] | None:
        """The batch and the options of a system with which it is fastest; None if it cannot run at all."""
        variants = SYSTEMS[system][2]
        if system.startswith("ours"):
            return self.row.prompts, variants[0]
        known = self.known.get("systems", {}).get(system, {})
        if "batch" in known:
            return known["batch"], known["options"]
        rates: dict[int, float] = {}
        batch = START
        while self._could_hold(batch):
            rates[batch] = self._probe(system, batch, variants[0])
            if rates[batch] <= rates.get(batch // 2, 0):
                break
            batch *= 2
        batch = START
        while not any(rates.values()) and batch > 1:
            batch //= 2
            rates[batch] = self._probe(system, batch, variants[0])
        if not any(rates.values()):
            return None
        batch = max(rates, key=rates.get)
        first, *others = variants
        tried = [(NOISE * rates[batch], first), *((self._probe(system, batch, o), o) for o in others)]
        return batch, max(tried, key=lambda pair: pair[0])[1]

    def _could_hold(self, batch: int) -> bool:
        """Whether the full cache alone of so many sequences is less than the cap."""
        config = OPTConfig.named(self.row.model)
        slot = 4 * config.num_hidden_layers * config.hidden_size
        room = self.row.cap * GIB if self.row.cap is not None else memory.ram_available()
        return self.row.device == "cuda" or batch * (self.row.prompt_len + self.row.gen_len) * slot < room

    def _probe(self, system: str, batch: int, options: dict) -> float:
        """Tokens/s of the whole job, going by its first tokens; 0 if it fails."""
        gen_len = min(PROBE, self.row.gen_len)
        run = self.run(system, batch, gen_len, options, PROBE_LIMIT)
        if "failed" in run:
            return 0.0
        step = run["decode"] / (gen_len - 1)
        return batch * self.row.gen_len / (run["prefill"] + (self.row.gen_len - 1) * step)

    # the row

    def tables(self) -> str:
        """What the row's file holds, and with `quick` what docs/benchmarks has of the row."""
        here = throughput({self.name: common.stored(self.file)})
        return f"{here}\n\nFor comparison:\n{throughput({self.name: self.known})}" if self.known else here

    def fill(self, runs: int, systems: list[str]) -> None:
        """Whole runs of all systems, in turns."""
        best = {system: self.best(system) for system in systems}
        for _ in range(runs):
            for system in systems:
                while best[system] is not None:
                    batch, options = best[system]
                    if "failed" not in self.run(system, batch, self.row.gen_len, options, RUN_LIMIT):
                        break
                    best[system] = self._next(system, batch, options)

    def _next(self, system: str, batch: int, options: dict) -> tuple[int, dict] | None:
        """What to run when a whole run failed, though its first tokens did not: less, if there is less."""
        first = SYSTEMS[system][2][0]
        if system.startswith("ours"):
            return None
        if options != first:
            return batch, first
        return (batch // 2, first) if batch > 1 else None

    def frontier(self, systems: list[str]) -> None:
        """Blocks of our systems from a few sequences up to all, each a job of its own."""
        for system in systems:
            blocks = self.row.prompts
            while system.startswith("ours") and blocks >= 4:
                options = SYSTEMS[system][2][0] | {"block": [min(64, blocks), -(-blocks // 64)]}
                self.run(system, blocks, self.row.gen_len, options, RUN_LIMIT)
                blocks //= 4

    def save(self) -> None:
        data = {
            "row": asdict(self.row),
            "dtype": self.dtype,
            "kv_budget": self.kv_budget,
        }
        cap = None if self.row.cap is None or self.row.device == "cuda" else int(self.row.cap * GIB)
        common.save(self.file, data | {"systems": self.summary(), "runs": self.runs}, cap, PEERS)

    def summary(self) -> dict:
        """Per system: medians of its whole runs with the batch that did best."""
        found = {}
        for system in self.row.systems:
            whole = [
                r
                for r in self.runs
                if r["system"] == system and r["gen_len"] == self.row.gen_len and "block" not in r["options"]
            ]
            tried = [r for r in self.runs if r["system"] == system and "block" not in r["options"]]
            failed = sorted({f"batch {r['batch']}: {r['failed']}" for r in tried if "failed" in r})
            groups: dict[str, list[dict]] = {}
            for r in whole:
                if "failed" not in r:
                    groups.setdefault(json.dumps([r["batch"], r["options"]]), []).append(r)
            found[system] = {"failed": failed}
            if not groups:
                continue
            runs = max(groups.values(), key=lambda g: median([speed(r) for r in g]))
            found[system] |= {
                "tokens_per_s": median([speed(r) for r in runs]),
                "prefill_seconds": median([r["prefill"] for r in runs]),
                "decode_seconds": median([r["decode"] for r in runs]),
                "batch": runs[0]["batch"],
                "options": runs[0]["options"],
                "lowest_tier": runs[0]["lowest_tier"],
                "runs": len(runs),
            }
            if "floor" in runs[0]:
                found[system] |= {
                    "policy": runs[0]["report"]["policy"],
                    "predicted_over_measured": median(
                        [r["report"]["predicted"]["tokens_per_s"] / speed(r) for r in runs]
                    ),
                    "bound_by": max(runs[0]["floor"], key=runs[0]["floor"].get),
                    "decode_over_floor": median([r["decode"] / max(r["floor"].values()) for r in runs]),
                }
        return found


def write_checkpoint(model: str, folder: Path, dtype: str) -> Path:
    """Random weights of a named size, as transformers would save them: shards of safetensors with an index."""
    from safetensors.torch import save_file
    from transformers import OPTConfig as Theirs

    config, dtype = OPTConfig.named(model), getattr(torch, dtype)
    shapes = {
        name: shape
        for layer in opt.layers(config)
        for name, shape in (*layer.gathered.values(), *layer.streamed.values())
    }
    source = DummyCheckpoint(shapes, dtype)
    folder.mkdir()
    Theirs(**asdict(config), torch_dtype=str(dtype).removeprefix("torch.")).save_pretrained(folder)
    shard, where = {}, {}

    def flush() -> None:
        file = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=dtype)
        source.read(name, tensor, None)
        shard[f"model.{name}"] = tensor
        if sum(t.nbytes for t in shard.values()) > SHARD:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()
    return folder


def drop_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def speed(run: dict) -> float:
    """Generated tokens per second of the whole job."""
    return run["batch"] * run["gen_len"] / (run["prefill"] + run["decode"])


def why(code: int, output: str) -> str:
    """What ended a process, in words."""
    if code in (-9, 137):
        return "killed (out of memory)"
    lines = [line for line in output.splitlines() if line.strip()]
    return f"exit code {code}: {lines[-1][:200] if lines else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--row",
        action="append",
        choices=list(ROWS),
        help="only this one (may be given again)",
    )
    parser.add_argument(
        "--system",
        action="append",
        choices=list(SYSTEMS),
        help="only this one, likewise",
    )
    parser.add_argument("--runs", type=int, help="whole runs of every system (default: 3, of OPT-30B 1)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one run of every system, with the batch that docs/benchmarks has for it; kept apart, in quick_ROW.json",
    )
    parser.add_argument(
        "--frontier",
        action="store_true",
        help="our latency and throughput over the block size instead",
    )
    parser.add_argument("--list", action="store_true", help="print the rows")
    args = parser.parse_args()
    if args.list:
        for name, row in ROWS.items():
            cap = "no cap" if row.cap is None else f"{row.cap:g} GiB"
            print(f"{name:<18}{row.model}, {cap}: {', '.join(row.systems)}")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = args.row or [
        name for name, row in ROWS.items() if row.device == device and row.model != "facebook/opt-125m"
    ]
    for name in names:
        row = ROWS[name]
        systems = [s for s in row.systems if args.system is None or s in args.system]
        folder = common.scratch()
        try:
            bench = Bench(name, row, folder, args.quick)
            runs = 1 if args.quick else args.runs or row.runs
            if args.frontier:
                bench.frontier(systems)
            else:
                bench.fill(runs, systems)
                print(f"\n{bench.tables()}")
        finally:
            common.remove(folder)


if __name__ == "__main__":
    main()
