"""Workers as Ray's actors, on a Ray of this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from command_tools import FP32, ON_DISK, percent, read_rows, write_rows

from h2o_flexgen.jobs import cluster
from h2o_flexgen.jobs.ray import RayLLM

pytest_plugins = ["command_tools"]
ray = pytest.importorskip("ray")

#: where each pass takes a while
SLOW = ("--hh-ratio", 0.3, "--gpu-batch-size", 2, "--num-gpu-batches", 2, *percent(ON_DISK))


@pytest.fixture(scope="module", autouse=True)
def running(tmp_path_factory):
    """One Ray for all tests of this file: starting it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H2O_FLEXGEN_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setattr(cluster.os, "sched_getaffinity", lambda pid: {0, 1, 2})
        cluster._connect(ray, None)
    yield
    ray.shutdown()


def rows(count: int) -> list[dict]:
    found = [{"prompt_token_ids": [3 + (5 * n + m) % 90 for m in range(1 + n % 9)]} for n in range(count)]
    for n, row in enumerate(found):
        row |= {"temperature": 0.8} if n % 2 else {}
        row |= {"custom_id": f"row {n}"} if n % 3 else {}
    found[7] = {"prompt": 5}
    return found


def kill_one(output: Path, llms: list[RayLLM], killed: list[int]) -> None:
    """Kill a worker's process once some rows are written."""
    while not (output.exists() and output.read_bytes().count(b"\n") > 8):
        time.sleep(0.01)
    actor = llms[0].crew.workers[0].actor
    killed.append(PIDS[actor._actor_id])
    os.kill(killed[0], signal.SIGKILL)


PIDS: dict = {}


def test_two_workers_of_which_one_is_killed_give_one_workers_rows(cli, model, tmp_path, monkeypatch):
    job = ("--model", model, *FP32, *SLOW, "--gen-len", 12, "--ignore-eos")
    job += ("--input-file", write_rows(tmp_path / "in.jsonl", rows(70)))
    assert cli(*job, "--output-file", tmp_path / "one.jsonl")[0] == 0

    llms = []
    take = RayLLM._take_settings

    def noted(self, args):
        take(self, args)
        llms.append(self)
        for worker in self.crew.workers:
            PIDS[worker.actor._actor_id] = ray.get(worker.actor.pid.remote())

    monkeypatch.setattr(RayLLM, "_take_settings", noted)
    killed = []
    two = tmp_path / "two.jsonl"
    killer = threading.Thread(target=kill_one, args=(two, llms, killed), daemon=True)
    killer.start()
    code, out, err = cli(*job, "--output-file", two, "--workers", 2, "--worker-cpus", 1)
    assert code == 0, err
    assert read_rows(two) == read_rows(tmp_path / "one.jsonl")
    assert killed and "worker 0 on" in err and "has died with" in err
    assert "died 1 times" in out
    assert "limited by the same disk" in err
    assert not ray.util.list_named_actors() and all(llm.crew.workers == [None, None] for llm in llms)


def test_more_workers_than_cores_are_refused(cli, model, tmp_path):
    files = ("--input-file", write_rows(tmp_path / "in.jsonl", rows(9)), "--output-file", tmp_path / "out.jsonl")
    code, _, err = cli("--model", model, *files, "--workers", 2, "--worker-cpus", 2)
    assert code == 2
    assert err == "error: --workers 2 with 2 cores each: this machine has room for 1\n"
