"""Jobs on several workers, on a Ray of this machine.

    python -m bench.workers million    # 1,000,000 rows of 64 tokens, with workers that compute nothing
    python -m bench.workers kills      # one job, whose workers, driver and cluster are killed again and again
    python -m bench.workers speed      # two workers of one core beside one, in turns; the machine must be idle

`million` stops a job by SIGKILL at nine tenths of its rows and goes on; imports and Ray's start are not counted, and
the peak RAM is the driver's. `speed` runs a random model of the shape of OPT in float32, all in RAM. Results go to
docs/benchmarks/workers_*.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from bench import common
from h2o_flexgen import SamplingParams
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.jobs.cluster import Workers
from h2o_flexgen.jobs.input import read_rows
from h2o_flexgen.jobs.job import Job

#: a model with room for the prompts; only its sizes matter
SMALL = {
    "model_type": "opt",
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 32,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "eos_token_id": 2,
}
WIDE = SMALL | {"hidden_size": 768, "word_embed_proj_dim": 768, "ffn_dim": 3072, "num_hidden_layers": 8}
MILLION = (10_000, 1_000_000)
KILLS = {"workers": 50, "driver": 10, "cluster": 5}
PORT = 6397
RUNS = 3
#: the most seconds between the start of a driver and its next row
PATIENCE = 120.0
#: seconds until a driver notices that its cluster has gone
RECONNECT = "5"


def write_model(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# a million rows


class Stop(Observer):
    """Kills this process once so many rows are written, and notes when the first was."""

    def __init__(self, rows: int):
        self.rows = rows
        self.first: float | None = None

    def on_finished(self, rows: list) -> None:
        self.first = self.first or time.monotonic()
        self.rows -= len(rows)
        if self.rows <= 0:
            self.show()
            os.kill(os.getpid(), signal.SIGKILL)

    def show(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        found = {"seconds": time.monotonic() - self.begun, "to_first_row": self.first - self.begun, "peak": peak}
        print(json.dumps(found), flush=True)


def run_stub(folder: Path, stop: int) -> None:
    """One run of a job whose workers compute nothing, in a process of its own."""
    from bench.stub_worker import StubRayLLM

    observer = Stop(stop)
    options = {"model": str(folder / "model"), "path": "_DUMMY_", "device": "cpu", "dtype": "float32"}
    with StubRayLLM(Workers(2), **options, progress=False, observer=observer) as llm:
        observer.begun = time.monotonic()
        with Job(str(folder / "out.jsonl")) as job:
            job.run(llm, read_rows(str(folder / "in.jsonl"), before=job.known), SamplingParams(max_tokens=1))
        observer.show()


def measure_rows(folder: Path, count: int) -> dict:
    write_model(folder / "model", SMALL)
    with open(folder / "in.jsonl", "w") as file:
        for n in range(count):
            print(json.dumps({"prompt_token_ids": [3 + n % 90] * 64, "custom_id": f"row {n}"}), file=file)
    runs = []
    for stop in (count * 9 // 10, 1 << 62):
        argv = [sys.executable, "-m", "bench.workers", "stub", str(folder), str(stop)]
        done = subprocess.run(argv, cwd=common.ROOT, stdout=subprocess.PIPE, text=True)
        assert done.returncode in (0, -signal.SIGKILL), done.returncode
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    lines = (folder / "out.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(count)), "a row is lost or doubled"
    return {
        "rows": count,
        "ms_a_row": 1e3 * sum(run["seconds"] for run in runs) / count,
        "mib": max(run["peak"] for run in runs) / (1 << 20),
        "seconds_to_go_on": runs[1]["to_first_row"],
    }


def million() -> None:
    rows = []
    with common.machine_use() as use:
        for count in MILLION:
            with common.scratch() as folder:
                rows.append(measure_rows(folder, count))
                print(rows[-1], flush=True)
    common.save("workers_million", {"rows": rows} | use)


# kills


def job_rows(count: int) -> list[dict]:
    """Rows of several lengths, some sampled, some with a name, one that cannot be run."""
    found = []
    for n in range(count):
        row = {"prompt_token_ids": [3 + (7 * n + m) % 90 for m in range(20 + 9 * (n % 5))], "max_tokens": 100 + n % 60}
        row |= {"custom_id": f"row-{n}"} if n % 3 else {}
        found.append(row | ({"temperature": 0.8} if n % 2 else {}))
    found[count // 2] = {"prompt": 5}
    return found


class Disturbed:
    """One job on two workers of a cluster of its own, and what kills them.

    Attributes:
        left: kills that are left of each kind.
    """

    def __init__(self, folder: Path, rows: int):
        self.folder = folder
        self.rng = random.Random(0)
        self.left = dict(KILLS)
        self.done: set = set()
        self.driver: subprocess.Popen | None = None
        model = write_model(folder / "model", WIDE)
        (folder / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in job_rows(rows)))
        self.job = ["--model", model, "--path", "_DUMMY_", "--device", "cpu", "--dtype", "float32", "--ignore-eos"]
        # no heavy hitters: with random weights the scores of two tokens may differ by less than rounding, which depends
        # on how rows are batched
        self.job += ["--gpu-batch-size", 4, "--hh-ratio", 0, "--recent-ratio", 0.2, "--input-file", folder / "in.jsonl"]
        self.env = dict(os.environ, RAY_AUTH_MODE="disabled", RAY_gcs_rpc_server_reconnect_timeout_s=RECONNECT)
        self.env |= {"RAY_memory_monitor_refresh_ms": "0", "H2O_FLEXGEN_HOME": str(folder / "home")}
        self.sessions = f"/tmp/h2o-ray-{os.getpid()}"  # short: it is part of a socket's name

    def command(self, out: str, *argv) -> list[str]:
        words = [*self.job, "--output-file", self.folder / out, *argv]
        return [sys.executable, "-m", "h2o_flexgen", "generate", *map(str, words)]

    def start_cluster(self) -> None:
        options = ["--head", "--port", PORT, "--num-cpus", 2, "--include-dashboard=false", "--temp-dir", self.sessions]
        argv = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *map(str, options),
            "--object-store-memory",
            str(100 << 20),
        ]
        subprocess.run(argv, env=self.env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def start_driver(self) -> None:
        with open(self.folder / "driver.log", "ab") as log:
            argv = self.command("out.jsonl", "--workers", 2, "--ray", f"127.0.0.1:{PORT}")
            self.driver = subprocess.Popen(argv, cwd=common.ROOT, env=self.env, stdout=log, stderr=log)

    def of_cluster(self) -> list[psutil.Process]:
        """The processes of our cluster: those that name its folder, and their children."""
        heads = [p for p in psutil.process_iter() if self.sessions in " ".join(_words(p))]
        return list({child for head in heads for child in [head, *_children(head)]})

    def kill(self, kind: str) -> bool:
        """Kill something of a kind; returns whether there was any."""
        if kind == "workers":
            workers = [p for p in self.of_cluster() if _words(p)[:1] and _words(p)[0].startswith("ray::Worker")]
            if not workers:
                return False
            _kill(self.rng.choice(workers))
            return True
        if kind == "cluster":
            for process in self.of_cluster():
                _kill(process)
            self.driver.wait(120)
            self.start_cluster()
        self.driver.kill()
        self.driver.wait()
        self.start_driver()
        self.wait_for_rows()
        return True

    def wait_for_rows(self) -> None:
        """Let the job get on before it is killed again."""
        path = self.folder / "out.jsonl"
        before = path.stat().st_size if path.exists() else 0
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not (path.exists() and path.stat().st_size > before):
            time.sleep(0.2)

    def check(self) -> None:
        """No finished row is lost, and none stands twice."""
        path = self.folder / "out.jsonl"
        whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        ids = [json.loads(line)["index"] for line in whole]
        assert len(set(ids)) == len(ids), "a row stands twice"
        assert self.done <= set(ids), "a finished row was lost"
        self.done = set(ids)

    def run(self) -> None:
        """The job to its end, through all kills."""
        self.start_cluster()
        self.start_driver()
        try:
            self.wait_for_rows()
            while any(self.left.values()):
                time.sleep(self.rng.uniform(2, 8))
                if self.driver.poll() is not None:
                    break
                kind = self.rng.choices([*self.left], [*self.left.values()])[0]
                self.left[kind] -= self.kill(kind)
                self.check()
                print(len(self.done), self.left, flush=True)
            assert self.driver.wait() == 0, (self.folder / "driver.log").read_text()[-2000:]
        finally:
            self.driver.kill()
            for process in self.of_cluster():
                _kill(process)
            shutil.rmtree(self.sessions, ignore_errors=True)


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.kill()


def kills(rows: int) -> None:
    with common.scratch() as folder:
        begin = time.time()
        job = Disturbed(folder, rows)
        job.run()
        seconds = time.time() - begin
        subprocess.run(job.command("alone.jsonl", "--gpu-batch-size", 64), cwd=common.ROOT, env=job.env, check=True)
        ours = (folder / "out.jsonl").read_text().splitlines()
        alone = (folder / "alone.jsonl").read_text().splitlines()
    assert len(ours) == len(alone) == rows, "a row is lost or doubled"
    changed = [n for n, (our, other) in enumerate(zip(ours, alone)) if our != other]
    assert not changed, f"rows {changed} are not those of one LLM, such as {ours[changed[0]]}, {alone[changed[0]]}"
    done = {kind: count - job.left[kind] for kind, count in KILLS.items()}
    common.save(
        "workers_kills", {"rows": [done | {"rows": rows, "same": rows - len(changed), "minutes": seconds / 60}]}
    )


# speed


def rate(folder: Path, workers: int) -> float:
    """Tokens/s of a job on so many workers of one core."""
    out = folder / "out.jsonl"
    report = folder / "report.json"
    words = ["--model", folder / "model", "--path", "_DUMMY_", "--device", "cpu", "--dtype", "float32", "--ignore-eos"]
    words += ["--num-prompts", 128, "--prompt-len", 64, "--gen-len", 64, "--gpu-batch-size", 32, "--restart"]
    words += ["--output-file", out, "--report", report, "--workers", workers, "--worker-cpus", 1]
    argv = [sys.executable, "-m", "h2o_flexgen", "generate", *map(str, words)]
    subprocess.run(argv, cwd=common.ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for old in folder.glob("out.jsonl*"):
        old.unlink()
    return json.loads(report.read_text())["total"]["tokens_per_s"]


def speed() -> None:
    with common.scratch() as folder, common.machine_use() as use:
        write_model(folder / "model", WIDE)
        pairs = []
        for n in range(RUNS):
            order = (1, 2) if n % 2 else (2, 1)
            pairs.append({workers: rate(folder, workers) for workers in order})
            print(pairs[-1], flush=True)
    ratio = median(pair[2] / pair[1] for pair in pairs)
    rates = {f"workers_{n}": median(pair[n] for pair in pairs) for n in (1, 2)}
    common.save("workers_speed", {"rows": [rates | {"ratio": ratio}], "pairs": pairs} | use)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("million", "kills", "speed", "stub"))
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--rows", type=int, default=300)
    args = parser.parse_args()
    if args.what == "stub":
        run_stub(Path(args.rest[0]), int(args.rest[1]))
    elif args.what == "kills":
        kills(args.rows)
    else:
        {"million": million, "speed": speed}[args.what]()


if __name__ == "__main__":
    main()
