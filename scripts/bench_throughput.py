"""Throughput of h2o_flexgen, Hugging Face Accelerate, DeepSpeed ZeRO-Inference and transformers, side by side.

    python scripts/bench_throughput.py --list
    python scripts/bench_throughput.py --row "1.3b 32+32" --quick --system Accelerate --system "ours, H2O"

All systems run the same job (a random checkpoint, dtype, prompts, a fixed output length), each in a process of its own
inside the same memory cgroup, page cache included, after the page cache was dropped; loading is not counted. First each
peer's batch is doubled until it fails or slows down, then all take turns. Every run is added to
docs/benchmarks/throughput_ROW_MACHINE.json as soon as it ends, so that a benchmark that was stopped goes on where it
was; another machine has a file of its own. Needs root for the cgroup, and the packages of the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path

import bench_common as common
import torch
from bench_common import MemoryCap
from bench_systems import Job, disk_rate, fits_in_ram
from make_tables import throughput
from throughput_rows import NOT_BUILT, died_of_its_size, is_superseded, is_swept, speed, summarise, table_runs

from h2o_flexgen.models import opt
from h2o_flexgen.models.config import OPTConfig
from h2o_flexgen.offload.random_weights import DummyCheckpoint

GIB = 1 << 30
PEERS = ("accelerate", "deepspeed", "flexgen")
#: heavy + recent slots over prompt + output, as the H2O paper counts
BUDGET = 0.2
#: output tokens of the runs that look for a peer's best batch, and the sequences they start with
PROBE, START = 8, 16
#: other options of a peer are taken if they are so much faster
NOISE = 1.05
#: bytes of a process that has imported torch and transformers
PROCESS = 1 << 29
#: bytes of a shard of the checkpoint
SHARD = 1 << 30
#: the fewest sequences of a block on the frontier
SMALLEST = 8
#: of what a process printed before it failed
LAST_LINES = 20
#: exit status where what was given for everything is spent
TIME_OVER = 3


@dataclass(frozen=True)
class System:
    """A line of the table.

    Attributes:
        runner: its name in bench_systems.
        package: what has to be installed.
        placements: options; for each of them the batch is doubled. `on_cuda`: those there.
        tweaks: options to try at the best batch, and beside those that are taken; what takes memory last.
    """

    runner: str
    package: str
    placements: tuple[dict, ...] = ({},)
    on_cuda: tuple[dict, ...] | None = None
    tweaks: tuple[dict, ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.runner == "ours"

    def places(self, device: str) -> tuple[dict, ...]:
        return self.on_cuda if device == "cuda" and self.on_cuda else self.placements


#: of DeepSpeed, those that ZeRO-Inference builds, on a card or not
OPERATORS = ("async_io", "deepspeed_shm_comm", "pin_memory", "utils")
EAGER = {"attention": "eager"}
#: options that do something only where a system reads from that tier
OF_TIER = {"threads": "disk", "buffers": "disk", "cpu_attention": "RAM"}
SYSTEMS = {
    "transformers": System("transformers", "transformers", tweaks=(EAGER,)),
    "Accelerate": System(
        "Accelerate",
        "accelerate",
        on_cuda=({"share": 0.85}, {"share": 0.3}),
        tweaks=(EAGER, {"share": 0.25}, {"share": 0.15}),
    ),
    "ZeRO-Inference": System("ZeRO-Inference", "deepspeed", tweaks=(EAGER, {"threads": 2}, {"buffers": 4})),
    "FlexGen": System("FlexGen", "flexgen", tweaks=({"cpu_attention": False},)),
    "ours, full cache": System("ours", "pulp"),
    "ours, H2O": System("ours", "pulp", ({"h2o": True},)),
}

#: FlexGen itself needs CUDA
HERE = tuple(s for s in SYSTEMS if s != "FlexGen")
#: plain transformers only pages a model that does not fit: shown in the short rows
OFFLOADING = tuple(s for s in HERE if s != "transformers")


@dataclass(frozen=True)
class Row:
    """One line of the matrix.

    Attributes:
        cap: GiB of RAM, or of the card with CUDA; None: all there is.
        prompts: of our job.
        limits: seconds after which a probe, and a whole run, count as failed: a program over its cap may thrash.
        start: the batch from which a peer's is doubled, if not START.
        search: whether a peer's best batch is looked for. Without, it is the largest power of two whose cache fits.
    """

    model: str
    prompt_len: int
    gen_len: int
    cap: float | None
    prompts: int
    device: str = "cpu"
    systems: tuple[str, ...] = HERE
    runs: int = 3
    limits: tuple[int, int] = (900, 10800)
    start: dict[str, int] = field(default_factory=dict)
    search: bool = True

    def same_job(self, other: dict) -> bool:
        return all(getattr(self, k) == other[k] for k in ("model", "prompt_len", "gen_len", "cap", "device"))


#: GiB: what is sold as 16 GB
CARD = 14.9

#: near the H2O paper's batches on a card of 16 GB (its table of throughputs), from which to look
PUBLISHED = {
    "6.7b": {
        32: {"transformers": 2, "Accelerate": 2, "ZeRO-Inference": 16, "FlexGen": 2},
        512: {"transformers": 1, "Accelerate": 1, "ZeRO-Inference": 16, "FlexGen": 1},
        1024: {"transformers": 1, "Accelerate": 16, "ZeRO-Inference": 16, "FlexGen": 1},
    },
    "30b": {
        32: {"Accelerate": 8, "ZeRO-Inference": 4, "FlexGen": 128},
        512: {"Accelerate": 8, "ZeRO-Inference": 4, "FlexGen": 64},
        1024: {"Accelerate": 8, "ZeRO-Inference": 4, "FlexGen": 32},
    },
}

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
        limits=(7200, 36000),
        search=False,
    ),
    **{
        f"cuda {size} 512+{gen}": Row(
            f"facebook/opt-{size}",
            512,
            gen,
            CARD,
            prompts,
            "cuda",
            systems=tuple(s for s in SYSTEMS if s != "transformers" or size == "6.7b"),
            start=PUBLISHED[size][gen],
        )
        for size, prompts in (("6.7b", 64), ("30b", 512))
        for gen in (32, 512, 1024)
    },
    # to try the script itself
    "125m 16+8": Row("facebook/opt-125m", 16, 8, 1, 32),
}


class TimeIsOver(Exception):
    """What was given for everything together is spent."""


class Bench:
    """One row: runs systems, keeps what came of them in the row's file, and never does the same run twice.

    Args:
        quick: a file of its own, made anew; every system at the batch and with the options that did best in
            docs/benchmarks, on whatever machine that was, or at the batch from which the search would start.
        restart: of a kept run, whether it is to be made anew; it stays in the file, marked as superseded.
        deadline: `time.monotonic()` from which runs raise TimeIsOver.

    Raises:
        SystemExit: the row's file of this machine holds runs that cannot be compared with those made here.
    """

    def __init__(
        self,
        name: str,
        row: Row,
        folder: Path,
        quick: bool = False,
        restart: Callable[[dict], bool] = lambda run: False,
        deadline: float = float("inf"),
    ):
        self.name, self.row, self.folder, self.quick, self.deadline = name, row, folder, quick, deadline
        stem = f"throughput_{name.replace(' ', '_').replace('+', '_')}"
        known = {path.stem: common.stored(path.stem) for path in sorted(common.RESULTS.glob(f"{stem}_*.json"))}
        mine = next((file for file, data in known.items() if common.made_elsewhere(data) is None), None)
        self.known = dict(sorted(known.items(), key=lambda item: item[0] != mine))  # this machine's first
        self.file = f"quick_{stem}" if quick else mine or self._free_name(stem)
        self.dtype = "float16" if row.device == "cuda" else "bfloat16"
        self.versions: dict = {}  # of the runs that are kept: not every package is needed for every run
        self.runs = [] if quick else self._kept(restart)
        # what died of something else than memory or time may have been mended
        self._taken = {n for n, run in enumerate(self.runs) if is_superseded(run) or not is_result(run)}
        self._built: str | None = None

    def _free_name(self, stem: str) -> str:
        """For the runs of this machine."""
        name = f"{stem}_{common.machine_name()}"
        return next(free for free in chain([name], (f"{name}_{n}" for n in count(2))) if free not in self.known)

    def _kept(self, restart: Callable[[dict], bool]) -> list[dict]:
        kept = self.known.get(self.file)
        if kept is None:
            return []
        old = {"superseded": date.today().isoformat(), "versions": kept["versions"]}
        runs = [old | run if restart(run) else run for run in kept["runs"]]
        differ = "the job was another" if not self.row.same_job(kept["row"]) else common.made_otherwise(kept, *PEERS)
        if differ and all(map(is_superseded, runs)):
            return runs if self.row.same_job(kept["row"]) else []
        self.versions = kept["versions"]
        if differ:
            sys.exit(
                f"error: docs/benchmarks/{self.file}.json holds other runs ({differ}): --quick keeps its own apart, "
                "--restart replaces them"
            )
        return runs

    # one run

    def run(self, system: str, batch: int, gen_len: int, options: dict, limit: float) -> dict:
        """A run that was kept and not asked for yet, or a new one. "failed" in the result says why it died."""
        key = {"system": system, "batch": batch, "gen_len": gen_len, "options": options}
        for n, r in enumerate(self.runs):
            if n not in self._taken and {k: r[k] for k in key} == key:
                self._taken.add(n)
                return r
        made = {"date": date.today().isoformat(), "command": common.command()}
        run = key | made | self._in_a_process(system, batch, gen_len, options, limit)
        self._taken.add(len(self.runs))
        self.runs.append(run)
        what = run.get("failed") or f"{speed(run):.2f} tokens/s"
        try:
            self.save()
        finally:
            print(f"{self.name}: {system}, batch {batch}, {gen_len} tokens {options or ''}: {what}", flush=True)
        return run

    def _in_a_process(self, system: str, batch: int, gen_len: int, options: dict, limit: float) -> dict:
        row, runner = self.row, SYSTEMS[system].runner
        if runner == "ZeRO-Inference" and (failed := self.build_operators()):
            return {"failed": f"{NOT_BUILT} (a C++ compiler, Python headers, libaio-dev): {failed}"}
        cap = None if row.cap is None else int(row.cap * GIB)
        job = Job(
            runner,
            str(self.checkpoint),
            str(self.scratch),
            self.dtype,
            row.device,
            row.prompt_len,
            gen_len,
            batch,
            gpu_bytes=cap if row.device == "cuda" else None,
            ram_bytes=cap if row.device == "cpu" else None,
            options=options | ({"hardware": str(self.profile)} if runner == "ours" else {}),
            kv_budget=self.kv_budget if options.get("h2o") else None,
        )
        if SYSTEMS[system].is_ours or gen_len < row.gen_len:
            return self._finish(job, limit)
        # ours measures it itself, during the job too; here nothing may come between a peer's steps
        before = disk_rate(job.model)
        return self._finish(job, limit) | {"disk_before_and_after": [before, disk_rate(job.model)]}

    def _finish(self, job: Job, limit: float) -> dict:
        """What a job in a process of its own comes to."""
        left = self.deadline - time.monotonic()
        if left < 5:
            raise TimeIsOver(f"{self.name}: the time is over; what ran is kept")
        common.commit.cache_clear()  # the process is of the working copy as it is now
        commit = {"commit": common.commit()}
        try:
            self.scratch.mkdir(exist_ok=True)
            files = [self.scratch / n for n in ("job.json", "result.json", "output.txt")]
            files[0].write_text(json.dumps(asdict(job)))
            drop_page_cache(Path(job.model))
            argv = [
                sys.executable,
                str(Path(__file__).with_name("bench_systems.py")),
                *map(str, files[:2]),
            ]
            with open(files[2], "w") as output, MemoryCap(job.ram_bytes) as memory_cap:
                try:
                    done = memory_cap.run(argv, min(limit, left), stdout=output, stderr=subprocess.STDOUT)
                except subprocess.TimeoutExpired:
                    if left < limit:
                        during = f"during a run of {job.system}; what ran before is kept"
                        raise TimeIsOver(f"{self.name}: the time is over {during}") from None
                    return commit | {"failed": f"no end after {limit:.0f} s"}
                peak, killed = memory_cap.peak(), memory_cap.killed()
            told = files[2 if done.returncode else 1].read_text(errors="replace").replace(str(self.folder), "SCRATCH")
        except OSError as e:
            sys.exit(f"error: {self.name}: {e}")
        finally:  # what a system put there must not take the disk from the next
            shutil.rmtree(self.scratch, ignore_errors=True)
        if not done.returncode:
            return commit | json.loads(told) | {"cgroup_peak_bytes": peak}
        failed = why(done.returncode, killed, told)
        if not died_of_its_size(failed):
            print(*told.splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
        return commit | {"failed": failed, "cgroup_peak_bytes": peak}

    @property
    def scratch(self) -> Path:
        """A run's own folder."""
        return self.folder / "run"

    @property
    def kv_budget(self) -> list[int]:
        """(heavy, recent) slots."""
        slots = round(BUDGET * (self.row.prompt_len + self.row.gen_len))
        return [slots // 2, slots - slots // 2]

    @cached_property
    def checkpoint(self) -> Path:
        print(f"{self.name}: writing a random checkpoint", flush=True)
        return write_checkpoint(self.row.model, self.folder / "checkpoint", self.dtype)

    def build_operators(self) -> str:
        """DeepSpeed builds its operators when they are first used: before the clock runs, and outside the cap. What
        went wrong, or nothing."""
        if self._built is None:
            print(f"{self.name}: DeepSpeed's operators are built (minutes, once)", flush=True)
            forget_killed_builds()
            model = write_checkpoint("facebook/opt-125m", self.folder / "small", self.dtype)
            job = Job("ZeRO-Inference", str(model), str(self.scratch), self.dtype, self.row.device, 4, 2, 1)
            tiers = ("cpu", "nvme")
            if self.row.device == "cuda" and fits_in_ram(replace(job, model=str(self.checkpoint))):
                tiers = ("cpu",)
            runs = [self._finish(replace(job, options={"offload": tier}), 1800) for tier in tiers]
            self._built = "; ".join(run["failed"] for run in runs if "failed" in run)
        return self._built

    @cached_property
    def profile(self) -> Path:
        path = self.folder / "profile.json"
        argv = [sys.executable, "-m", "h2o_flexgen.hardware", "-o", str(path), "--offload-dir", str(self.folder)]
        argv += ["--dtype", self.dtype, "--device", self.row.device]
        if subprocess.run(argv, cwd=common.ROOT).returncode:
            sys.exit(f"error: {self.name}: this machine could not be measured (above)")
        return path

    # a peer at its best

    def best(self, system: str) -> tuple[int, dict] | None:
        """The batch and the options of a system with which it is fastest; None if it cannot run at all."""
        what = SYSTEMS[system]
        placements = what.places(self.row.device)
        if what.is_ours:
            return self.row.prompts, placements[0]
        if self.quick:
            for known in self.known.values():
                if "batch" in (found := summarise(known).get(system, {})):
                    return found["batch"], found["options"]
        if not self.row.search:
            fitting = [1 << n for n in range(self.row.prompts.bit_length()) if self._could_hold(1 << n)]
            return max(fitting, default=1), placements[0]
        if self.quick:
            return self.row.start.get(system, START), placements[0]
        rates = [(*self._grow(system, options), options) for options in placements]
        rate, batch, options = max(rates, key=lambda found: found[0])
        return (batch, self._tweaked(system, batch, options, rate)) if rate else None

    def _tweaked(self, system: str, batch: int, options: dict, rate: float) -> dict:
        """The options with the tweak, or with all tweaks that do no harm, that makes a rate the best, if it is clearly
        better, and so on beside these."""
        tweaks = [t for t in SYSTEMS[system].tweaks if not t.keys() & options]
        tweaks = [t for t in tweaks if self._could_hold(batch, t.get("share", options.get("share", 0)))]
        tiers = {None} | {r.get("lowest_tier") for r in self.runs if r["system"] == system}
        tweaks = [t for t in tweaks if all(OF_TIER.get(option) in tiers for option in t)]
        tried = [(self._probe(system, batch, options | tweak)[0], options | tweak) for tweak in tweaks]
        faster = sorted((pair for pair in reversed(tried) if pair[0] > rate), key=lambda pair: pair[0])
        together = {k: v for _, found in faster for k, v in found.items()}  # of two shares the better one
        if faster and together not in [found for _, found in tried]:
            tried.append((self._probe(system, batch, together)[0], together))
        best_rate, best = max(tried, key=lambda pair: pair[0], default=(0.0, options))
        return self._tweaked(system, batch, best, best_rate) if best_rate > NOISE * rate else options

    def _grow(self, system: str, options: dict) -> tuple[float, int]:
        """The best rate while the batch is doubled until it fails or slows down, and its batch."""
        rates: dict[int, float] = {}
        start = batch = self.row.start.get(system, START)
        while self._could_hold(batch):
            rates[batch], too_large = self._probe(system, batch, options)
            if rates[batch] <= rates.get(batch // 2, 0):
                break
            batch *= 2
        batch = start
        # a smaller batch is no help to what died of something else
        while not any(rates.values()) and batch > 1 and (not rates or too_large):
            batch //= 2
            rates[batch], too_large = self._probe(system, batch, options)
        return max(((rate, batch) for batch, rate in rates.items()), default=(0.0, 1))

    def _could_hold(self, batch: int, share: float = 0) -> bool:
        """Whether the full cache alone of so many sequences is less than the cap; with weights in RAM that take a share
        of it, whether these, a process, a layer and the vocabulary leave as much: else a run dies of it in its last
        tokens, an hour after a probe that went well."""
        config = OPTConfig.named(self.row.model)
        E = config.hidden_size
        room = (self.row.cap if self.row.cap is not None else common.machine()["ram_gib"]) * GIB
        if share:
            room -= share * room + PROCESS + 2 * E * (12 * E + config.vocab_size)
        cache = batch * (self.row.prompt_len + self.row.gen_len) * 4 * config.num_hidden_layers * E
        return self.row.device == "cuda" or cache < room

    def _probe(self, system: str, batch: int, options: dict) -> tuple[float, bool]:
        """Tokens/s of the whole job, going by its first tokens; 0 if it fails, and whether of its size."""
        gen_len = min(PROBE, self.row.gen_len)
        run = self.run(system, batch, gen_len, options, self.row.limits[0])
        if "failed" in run:
            return 0.0, is_result(run)
        step = run["decode"] / (gen_len - 1)
        return batch * self.row.gen_len / (run["prefill"] + (self.row.gen_len - 1) * step), False

    # the row

    def tables(self) -> str:
        """What the row's file holds, and with `quick` what docs/benchmarks has of the row."""
        here = throughput([common.stored(self.file)])
        known = [data for data in self.known.values() if table_runs(data)]
        return f"{here}\n\nFor comparison:\n{throughput(known)}" if self.quick and known else here

    def fill(self, runs: int, systems: list[str]) -> None:
        """Whole runs of all systems, in turns. One that dies of something else than its size is left out from there:
        the next benchmark, which may find it mended, goes on with it."""
        best = {system: self.best(system) for system in systems}
        left = dict.fromkeys(systems, runs)
        while any(left.values()):
            for system in filter(left.get, systems):
                ran = self._come_through(system, best[system])
                alike = left[system] if ran == best[system] else runs  # what another one died of counts no more
                best[system], left[system] = ran, alike - 1 if ran else 0

    def _come_through(self, system: str, tried: tuple[int, dict] | None) -> tuple[int, dict] | None:
        """The batch and options of a whole run that comes to its end, with less where one dies of its size."""
        while tried is not None:
            batch, options = tried
            run = self.run(system, batch, self.row.gen_len, options, self.row.limits[1])
            if "failed" not in run:
                break
            tried = self._next(system, batch, options) if is_result(run) else None
        return tried

    def _next(self, system: str, batch: int, options: dict) -> tuple[int, dict] | None:
        """What to run when a whole run died of its size, though its first tokens did not: less, if there is less."""
        for tweak in reversed(SYSTEMS[system].tweaks):  # those that take memory stand last
            if tweak.items() <= options.items():
                return batch, {k: v for k, v in options.items() if k not in tweak}
        while batch > 1:
            batch //= 2
            if self.quick or not self.row.search or not SYSTEMS[system].tweaks:
                return batch, options
            if self._died(system, batch, options):
                continue
            rate, too_large = self._probe(system, batch, options)  # anew: of the same minutes as its variants
            if not too_large:
                return batch, self._tweaked(system, batch, options, rate)
        return None

    def _died(self, system: str, batch: int, options: dict) -> bool:
        """Whether whole runs like this were made, and all died of their size."""
        runs = [r for r in table_runs({"runs": self.runs}, system) if (r["batch"], r["options"]) == (batch, options)]
        whole = [is_result(r) and "failed" in r for r in runs if r["gen_len"] == self.row.gen_len]
        return bool(whole) and all(whole)

    def frontier(self, sweeps: int, systems: list[str]) -> None:
        """Blocks of our systems from all sequences down to a few, each a job of its own, in turns; the next sweep goes
        up, because a disk that tires would slow the same end every time."""
        ours = [(system, SYSTEMS[system].placements[0]) for system in systems if SYSTEMS[system].is_ours]
        if not ours:
            sys.exit("error: --frontier sweeps our systems only")
        halvings = range((self.row.prompts // SMALLEST).bit_length())
        blocks = [self.row.prompts >> n for n in halvings]
        for n in range(sweeps):
            for block in blocks[:: -1 if n % 2 else 1]:
                for system, placement in ours:
                    options = placement | {"block": [min(64, block), -(-block // 64)]}
                    self.run(system, block, self.row.gen_len, options, self.row.limits[1])

    def save(self) -> None:
        data = {
            "command": f"python scripts/bench_throughput.py --row '{self.name}'{' --quick' * self.quick}",
            "row": asdict(self.row),
            "dtype": self.dtype,
            "kv_budget": self.kv_budget,
            "versions": self.versions | common.versions(*PEERS),
            "runs": self.runs,
        }
        cap = None if self.row.cap is None or self.row.device == "cuda" else int(self.row.cap * GIB)
        common.save(self.file, data, cap, PEERS)


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
    needed = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        sys.exit(
            f"error: the checkpoint of {model} takes {needed / GIB:.1f} GiB, {folder.parent} has {free / GIB:.1f} GiB"
        )
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


def forget_killed_builds() -> None:
    """torch waits without end for a build whose process was killed: its lock stays. DeepSpeed's operators nobody else
    builds while this benchmark has the machine for itself."""
    where = os.environ.get("TORCH_EXTENSIONS_DIR") or Path("~/.cache/torch_extensions").expanduser()
    for name in OPERATORS:
        for lock in Path(where).rglob(f"{name}/lock"):
            lock.unlink(missing_ok=True)


def drop_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def why(code: int, killed: bool, output: str) -> str:
    """What ended a process, in words. `killed`: the kernel killed something at the cap."""
    if code in (-9, 137):
        return "killed (out of memory)" if killed else "killed"
    lines = [line for line in output.splitlines() if line.strip()]
    # behind the error may come warnings, and what could not be cleaned up; torch marks what a rank printed
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)]
    of_size = [line for line in errors if died_of_its_size(line)]
    return f"exit code {code}: {(of_size or errors or lines or [''])[-1][:200]}"


def is_result(run: dict) -> bool:
    """Whether a run says something of its system: it came to its end, or died of its size, which ours must not."""
    return "failed" not in run or (died_of_its_size(run["failed"]) and not SYSTEMS[run["system"]].is_ours)


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
    parser.add_argument(
        "--runs",
        type=int,
        help="whole runs of every system, or of every block with --frontier (default: 3, of OPT-30B 1)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one run of every system, ours first, with the batch that docs/benchmarks has for it; kept apart, in "
        "quick_throughput_ROW.json",
    )
    parser.add_argument(
        "--frontier",
        action="store_true",
        help="our latency and throughput over the block size instead; the runs stand in the row's file with the others",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="make this machine's runs of a row anew; with --system or --frontier, such runs only. Earlier ones "
        "stay in its file, marked as superseded",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help=f"stop after so long, with exit status {TIME_OVER}; what ran is kept",
    )
    parser.add_argument("--list", action="store_true", help="print the rows")
    args = parser.parse_args()
    if args.runs is not None and args.runs < 1:
        parser.error("--runs takes a number from 1")
    if args.quick and (args.runs or args.restart or args.frontier):
        parser.error("--quick makes one run of each system, in a file made anew: no --runs, --restart or --frontier")
    if args.list:
        for name, row in ROWS.items():
            cap = "no cap" if row.cap is None else f"{row.cap:g} GiB"
            print(f"{name:<18}{row.model}, {cap}: {', '.join(row.systems)}")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = args.row or [
        name for name, row in ROWS.items() if row.device == device and row.model != "facebook/opt-125m"
    ]
    deadline = time.monotonic() + args.seconds

    def anew(run: dict) -> bool:
        kind = is_swept(run) == args.frontier or not (args.system or args.frontier)
        return args.restart and kind and run["system"] in systems

    for name in names:
        if ROWS[name].device == "cuda" and device != "cuda":
            sys.exit(f"error: the row {name!r} needs CUDA")
    if not any(set(ROWS[name].systems) & set(args.system or SYSTEMS) for name in names):
        sys.exit(f"error: {', '.join(args.system)} in none of these rows: {', '.join(names)} (--list)")
    for name in names:
        row = ROWS[name]
        systems = installed([s for s in row.systems if args.system is None or s in args.system], bool(args.system))
        if args.quick:  # ours first: where time runs out, the peers have been measured before
            systems.sort(key=lambda system: not SYSTEMS[system].is_ours)
        if not systems:
            continue
        if row.device == "cpu" and row.cap is not None:
            with MemoryCap(GIB):
                pass  # can one be made? Before minutes are spent
        with common.scratch() as folder:
            bench = Bench(name, row, folder, args.quick, anew, deadline)
            runs = 1 if args.quick else args.runs or row.runs
            over = None
            try:
                (bench.frontier if args.frontier else bench.fill)(runs, systems)
            except TimeIsOver as e:
                over = e
            if not args.frontier and table_runs({"runs": bench.runs}):
                print(f"\n{bench.tables()}")
            if over:
                print(f"\n{over}")
                sys.exit(TIME_OVER)


def installed(systems: list[str], asked: bool) -> list[str]:
    """Those that can run here. Raises SystemExit if one was `asked` for that cannot."""
    absent = {s: SYSTEMS[s].package for s in systems if find_spec(SYSTEMS[s].package) is None}
    for system, package in absent.items():
        message = f"{system} cannot run: {package} is not installed (docs/benchmarks.md)"
        if asked:
            sys.exit(f"error: {message}")
        print(message)
    return [s for s in systems if s not in absent]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; what ran is kept")
