"""Two realistic jobs, run to the end by ours and by llama-server.

    python -m bench.real_jobs                                              # both jobs, all systems
    python -m bench.real_jobs chat --system llama-server --places 16 32
    python -m bench.real_jobs --rows FOLDER                                # only write chat.jsonl and label.jsonl

Both run SmolLM2-135M-Instruct in Q4_1, greedily, and the model ends the rows. Seconds exclude loading: ours are from
its report, llama-server's from the first request to the last answer. Each run goes to docs/benchmarks/real_jobs.json
and replaces the previous one with the same settings.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics

from bench import common
from bench.checkpoint import checkpoint
from bench.memory_cap import die_with_parent
from bench.rows import DEMO, DEMO_KIND
from bench.systems import llama_server
from bench.systems.ours import policy_text

FILE = "real_jobs"
#: in the scratch folder
PROFILE = "hardware.json"
PLACES = (4, 8, 16, 32, 64)
#: our systems -> their options of `h2o-flexgen generate`
OURS = {"ours": "", "ours, int8 matmuls": "--compute int8"}
SYSTEMS = ("llama-server", *OURS)
#: counts of work that our report may contain
WORK = ("computed_tokens", "shared_tokens", "row_steps")
QUESTIONS = (
    "Explain the Python topic '{}' in one sentence.",
    "What is '{}' in Python? Answer briefly.",
    "Write a short paragraph about '{}' in Python.",
    "Give me three facts about '{}' in Python.",
)


@dataclass(frozen=True)
class RealJob:
    """A job; `context` is the most tokens, prompt and output, that a row takes."""

    about: str
    rows: list[dict]
    context: int


def chat(count: int) -> Iterator[dict]:
    """Short questions, whose answers vary widely in length."""
    names = sorted(topics)
    for i in range(count):
        question = QUESTIONS[i % len(QUESTIONS)].format(names[i % len(names)])
        yield {"custom_id": f"q{i}", "messages": [{"role": "user", "content": question}], "max_tokens": 256}


def label(count: int) -> Iterator[dict]:
    """Texts to label with one word, all after the same instructions."""
    names = sorted(topics)
    rules = "You label texts about Python. Rules and an example text follow.\n" + topics["with"][:1500]
    for i in range(count):
        text = topics[names[i % len(names)]][:150].replace("\n", " ")
        question = f"Text: {text}\nIs it about statements, types or modules? Answer with one word."
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
        yield {"custom_id": f"l{i}", "messages": messages, "max_tokens": 8}


JOBS = {
    "chat": RealJob("128 questions, up to 256 tokens out", list(chat(128)), 512),
    "label": RealJob("256 texts to label, 400 of 465 tokens in common", list(label(256)), 768),
}


def write_rows(rows: list[dict], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measure_machine(folder: Path) -> None:
    """Write a hardware profile, with which reports of jobs that fit in RAM predict their seconds too."""
    argv = [sys.executable, "-m", "h2o_flexgen", "hardware", "-o", str(folder / PROFILE)]
    subprocess.run(argv, check=True, cwd=common.ROOT, stdout=subprocess.DEVNULL)


def run_ours(rows: list[dict], flags: str, limit: float, folder: Path) -> dict:
    """The figures of our command line, run as users run it, with the seconds of the whole command."""
    report = folder / "report.json"
    outputs = folder / "texts.jsonl"
    inputs = write_rows(rows, folder / "rows.jsonl")
    argv = [sys.executable, "-m", "h2o_flexgen", "generate", *flags.split(), "--restart"]
    argv += ["--input-file", str(inputs), "--output-file", str(outputs), "--report", str(report)]
    argv += ["--hardware", str(folder / PROFILE)]
    env = os.environ | {"H2O_FLEXGEN_HOME": str(common.data_folder() / "home")}
    process = dict(env=env, capture_output=True, text=True, cwd=common.ROOT, preexec_fn=die_with_parent)
    begin = time.perf_counter()
    try:
        done = subprocess.run(argv, timeout=limit, **process)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {limit:g} s"}
    command_seconds = time.perf_counter() - begin
    if done.returncode:
        return {"failed": f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"}
    texts = [json.loads(line) for line in outputs.read_text().splitlines()]
    return {"command_seconds": command_seconds} | figures(json.loads(report.read_text()), texts)


def figures(report: dict, texts: list[dict]) -> dict:
    """The figures of a job, from its report and its output rows.

    Raises:
        ValueError: a row has an error.
    """
    if failed := [row["error"] for row in texts if "error" in row]:
        raise ValueError(f"{len(failed)} rows failed, the first: {failed[0]}")
    found = {
        "seconds": report["total"]["seconds"],
        "rows": len(texts),
        "tokens": sum(len(row["token_ids"]) for row in texts),
        "ended_by_model": sum(row["finish_reason"] == "stop" for row in texts),
        "prefill_seconds": report["prefill"]["seconds"],
        "decode_seconds": report["decode"]["seconds"],
        "policy": policy_text(report["policy"]),
        "computes_in": report["dtype"],
    }
    if predicted := report.get("predicted"):  # for the actual output lengths
        seconds = predicted["prefill_seconds"] + predicted["decode_seconds"]
        found["predicted_over_measured"] = seconds / found["seconds"]
    return found | {name: value for name in WORK if (value := find_value(report, name)) is not None}


def find_value(data: dict, name: str) -> object:
    """The value of this name at any depth of a report; None if there is none."""
    if name in data:
        return data[name]
    inner = (find_value(value, name) for value in data.values() if isinstance(value, dict))
    return next((value for value in inner if value is not None), None)


def run(job: RealJob, system: str, options: dict, limit: float, folder: Path) -> dict:
    """The figures of one run, or why it "failed"."""
    with common.machine_use() as use:
        if system == "llama-server":
            model = checkpoint(DEMO, DEMO_KIND, "bfloat16", common.data_folder())
            found = llama_server.run(job.rows, model, job.context, options, limit, folder / "server.log")
        else:
            found = run_ours(job.rows, OURS[system], limit, folder)
    if "failed" not in found:
        found["rows_per_s"] = found["rows"] / found["seconds"]
        found["tokens_per_s"] = found["tokens"] / found["seconds"]
    return found | use


def record(entry: dict) -> None:
    """Store a run; it replaces one with the same job, system and options. SystemExit as in `common.add_entry`."""
    extra = {"python": platform.python_version(), "jobs": {name: job.about for name, job in JOBS.items()}}
    common.add_entry(FILE, "runs", entry, ("job", "system", "options"), order, extra)


def order(run: dict) -> tuple[int, int, int]:
    """Sort key of the results."""
    return list(JOBS).index(run["job"]), SYSTEMS.index(run["system"]), run["options"].get("np", 0)


def settings(system: str, places: list[int], is_unified: bool) -> list[dict]:
    """The options of each run of a system: llama-server runs once for each number of places."""
    if system != "llama-server":
        return [{}]
    unified = {"kvu": ""} if is_unified else {}
    return [{"np": count} | unified for count in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="*", help=f"{' or '.join(JOBS)} (default: both)")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="run only this system (repeatable)")
    parser.add_argument("--places", type=int, nargs="+", default=PLACES, help="of llama-server, one run each")
    parser.add_argument("--kvu", action="store_true", help="let llama-server share one cache among its places")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which a run counts as dead")
    parser.add_argument("--rows", type=Path, metavar="FOLDER", help="write the rows to FOLDER and run nothing")
    args = parser.parse_args()
    if unknown := [name for name in args.job if name not in JOBS]:
        parser.error(f"unknown job {unknown[0]}: {', '.join(JOBS)}")
    if args.rows:
        for name, job in JOBS.items():
            print(write_rows(job.rows, args.rows / f"{name}.jsonl"))
        return
    with common.scratch() as folder:
        for system in args.system or SYSTEMS:
            if system in OURS:  # warm-up: compiles loops
                if not (folder / PROFILE).exists():
                    measure_machine(folder)
                run_ours(JOBS["chat"].rows[:2], OURS[system], args.limit, folder)
            for name in args.job or JOBS:
                for options in settings(system, args.places, args.kvu):
                    found = run(JOBS[name], system, options, args.limit, folder)
                    stamp = {"date": date.today().isoformat(), "commit": common.commit()}
                    record({"job": name, "system": system, "options": options} | found | stamp)
                    outcome = found.get("failed") or "{seconds:.1f} s, {rows_per_s:.2f} rows/s".format(**found)
                    print(f"{name}, {system} {options or ''}: {outcome}", flush=True)
    from bench.tables import TABLES

    print(f"\n{TABLES[FILE].text(common.load_result(FILE))}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; completed runs are kept")
