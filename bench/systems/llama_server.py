"""llama.cpp's server, from the same build as `llama_cpp`, with continuous batching. Each of its places has its own KV
cache and serves one request at a time. A request gets the free place whose last prompt shares the longest prefix with
its own, and only the rest is computed.

Options: its short flags, with "" for flags without a value: "np": 16 (places), or "kvu": "", one cache for all places.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

from bench.common import free_port
from bench.memory_cap import die_with_parent
from bench.systems import ensure_built
from bench.systems.llama_cpp import version, with_flags

BINARY = "build/bin/llama-server"
#: most seconds that loading the model may take
LOAD_LIMIT = 300


def command(model: Path, port: int, context: int, options: dict) -> list[str]:
    """The command line of a server whose places hold `context` tokens each."""
    argv = [ensure_built("llama_cpp", BINARY) / BINARY, "-m", model, "--host", "127.0.0.1", "--port", port]
    return with_flags(argv, {"c": context * options["np"]} | options)


def run(rows: list[dict], model: Path, context: int, options: dict, limit: float, log: Path) -> dict:
    """Send all rows over as many connections as places; seconds are from the first request to the last answer.

    Args:
        rows: with `messages` and `max_tokens`.
        limit: seconds after which the run counts as dead.
        log: file for the server's output.
    """
    with serving(model, context, options, log) as (address, server):
        answers = []
        timer = threading.Timer(limit, server.kill)
        timer.start()
        begin = time.perf_counter()
        try:
            with ThreadPoolExecutor(options["np"]) as connections:
                asked = [connections.submit(answer, address, row) for row in rows]
                for each in as_completed(asked):
                    answers.append(each.result())
        except (OSError, HTTPException) as e:
            if time.perf_counter() - begin < limit:
                return {"failed": str(e)}
            return {"failed": f"no end after {limit:g} s, {len(answers)} of {len(rows)} rows"}
        finally:
            timer.cancel()
        seconds = time.perf_counter() - begin
    used = [each["usage"] for each in answers]
    return {
        "seconds": seconds,
        "rows": len(answers),
        "tokens": sum(each["completion_tokens"] for each in used),
        "prompt_tokens": sum(each["prompt_tokens"] for each in used),
        "prompt_tokens_computed": sum(each["timings"]["prompt_n"] for each in answers),
        "ended_by_model": sum(each["choices"][0]["finish_reason"] == "stop" for each in answers),
        "version": version(ensure_built("llama_cpp", BINARY)),
    }


@contextmanager
def serving(model: Path, context: int, options: dict, log: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address and the process of a server that has loaded its model and warmed up.

    Raises:
        RuntimeError: it died, or took too long to load.
    """
    argv = command(model, free_port(), context, options)
    address = f"http://127.0.0.1:{argv[argv.index('--port') + 1]}"
    with open(log, "w") as output:
        server = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent)
    try:
        deadline = time.monotonic() + LOAD_LIMIT
        while not is_ready(address):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"llama-server did not start: {log.read_text(errors='replace')[-500:]}")
            time.sleep(0.1)
        yield address, server
    finally:
        server.kill()
        server.wait()


def is_ready(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=5) as response:
            return response.status == 200
    except OSError:  # not listening yet, or 503 while it loads
        return False


def answer(address: str, row: dict) -> dict:
    """The server's answer to one row. Raises OSError, HTTPException."""
    asked = {"messages": row["messages"], "max_tokens": row["max_tokens"], "temperature": 0, "cache_prompt": True}
    headers = {"Content-Type": "application/json"}
    request = Request(f"{address}/v1/chat/completions", json.dumps(asked).encode(), headers)
    with urlopen(request) as response:
        return json.load(response)
