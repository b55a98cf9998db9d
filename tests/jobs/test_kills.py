"""A job that is killed again and again gives the output of an undisturbed one.

By hand, with more kills, or of the demo model, which writes the figures to docs/benchmarks:

    python tests/jobs/test_kills.py --kills 100
    python tests/jobs/test_kills.py --kills 10 --rows 12 --seconds 30 --demo-model
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]
from command_tools import FP32, ON_DISK, end, percent, read_rows, start, wide, write_rows  # noqa: E402

from bench import common  # noqa: E402
from h2o_flexgen.commands.main import run_command  # noqa: E402

#: a random model whose job, all on disk, takes some seconds
MODEL = wide(128, vocab_size=256, num_hidden_layers=6, num_attention_heads=8, max_position_embeddings=512)
BATCH = 2
BATCHES = 2
#: tokens of the longest output: after this many passes the first rows have ended
LONGEST = 28


def rows(count: int) -> list[dict]:
    """Rows of several lengths and parameters, some with a name, one that cannot be run."""
    found = []
    for n in range(count):
        row = {"prompt_token_ids": [10 + (7 * n + m) % 200 for m in range(20 + 9 * (n % 5))], "max_tokens": 20 + n % 9}
        row |= {"custom_id": f"row-{n}"} if n % 3 else {}
        row |= {"temperature": 0.8, "top_p": 0.9} if n % 2 else {}
        found.append(row)
    found[count // 2] = {"prompt": 5}
    return found


def command(folder: Path, model: tuple, out: str) -> tuple:
    """The same job, to the output file `out`."""
    return (
        *model,
        *FP32,
        *("--input-file", folder / "in.jsonl", "--output-file", folder / out, "--hh-ratio", 0.2, "--seed", 3),
        *("--gpu-batch-size", BATCH, "--num-gpu-batches", BATCHES, "--ignore-eos", *percent(ON_DISK)),
        *("--offload-dir", folder / "offload"),
    )


def finished(path: Path) -> list:
    """The ids of the complete rows in an output file."""
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    done = [json.loads(line) for line in whole]
    return [row.get("custom_id", row["index"]) for row in done]


def kill_until_done(argv: tuple, path: Path, kills: int, seconds: float, rng: random.Random) -> dict:
    """Run a job, killed -9 at random moments, to its end; each kill loses at most the rows that were running.
    It comes within `seconds` after the job has begun to run."""
    done = []
    struck = 0
    later = 0
    while struck < kills:
        process = start(*argv)
        said = once_it_runs(process)
        try:
            process.wait(rng.uniform(0, seconds))
        except subprocess.TimeoutExpired:
            process.kill()
        code, _, err = end(process)
        now = finished(path)
        assert len(set(now)) == len(now), "a row stands twice"
        assert set(done) <= set(now), "a finished row was lost"
        # a pass is announced after the rows that ended with the previous one are on disk
        passes = max(map(int, re.findall(r"pass (\d+) of", said + err)), default=1)
        assert len(now) > len(done) or passes <= LONGEST, "more than the running rows were lost"
        was_late = len(now) > len(done)
        done = now
        if code == 0:  # it finished first
            break
        assert code == -signal.SIGKILL, said + err
        struck = struck + 1
        later = later + was_late
    undisturbed(argv)
    return {"kills": struck, "behind_the_first_block": later}


def undisturbed(argv: tuple) -> None:
    """Run a job to its end in this process."""
    printed = io.StringIO()
    with redirect_stderr(printed), redirect_stdout(printed):
        code = run_command("generate", [*map(str, argv)], "")
    assert code == 0, printed.getvalue()


def once_it_runs(process: subprocess.Popen) -> str:
    """Wait until weights are loaded, since nothing is written before. Returns stderr so far."""
    seen = b""
    while b"pass" not in seen and (piece := process.stderr.read(1)):
        seen += piece
    return seen.decode(errors="replace")


def check(folder: Path, model: tuple, count: int, kills: int, seconds: float = 1.0) -> dict:
    """Kill a job `kills` times, starting over whenever it is done, and compare each with an undisturbed one."""
    write_rows(folder / "in.jsonl", rows(count))
    undisturbed(command(folder, model, "whole.jsonl"))
    whole = read_rows(folder / "whole.jsonl")
    rng = random.Random(kills)
    jobs = 0
    total = Counter()
    while total["kills"] < kills:
        out = f"killed-{jobs}.jsonl"
        argv = command(folder, model, out)
        left = kills - total["kills"]
        total.update(kill_until_done(argv, folder / out, left, seconds, rng))
        assert read_rows(folder / out) == whole, "not the rows of a job that nobody killed"
        jobs += 1
        print(jobs, dict(total), flush=True)
    assert list((folder / "offload").iterdir()) == []
    return {**total, "jobs": jobs, "rows": count, "block": f"{BATCH} x {BATCHES}"}


def test_a_job_is_killed(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    model = ("--model", tmp_path / "model", "--path", "_DUMMY_")
    assert check(tmp_path, model, 8, 1)["kills"] == 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--demo-model", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = time.time()
        os.environ["H2O_FLEXGEN_HOME"] = f"{name}/home"
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        model = () if args.demo_model else ("--model", folder / "model", "--path", "_DUMMY_")
        found = check(folder, model, args.rows, args.kills, args.seconds)
    found |= {"model": "SmolLM2-135M-Instruct" if args.demo_model else "random, 6 layers of 128"}
    common.save(f"jobs_kills{'_demo_model' * args.demo_model}", {"rows": [found | {"seconds": time.time() - begin}]})


if __name__ == "__main__":
    main()
