"""llama.cpp's server, of the same build as `llama_cpp`: a number of places, each with a KV cache of its own, through
which requests go one after another (continuous batching). A request gets the free place whose last prompt begins most
like its own, and only what differs is computed.

Options: its own short flags, with "" for those without a value, such as "np": 16 (places) or "kvu": "", one cache for
all places.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

from bench.memory_cap import die_with_parent
from bench.systems import built

BINARY = "build/bin/llama-server"
#: seconds in which a server must have loaded its model
LOAD_LIMIT = 300


def command(model: Path, port: int, context: int, options: dict) -> list[str]:
    """`context`: tokens of each place."""
    flags = {"t": len(os.sched_getaffinity(0)), "c": context * options["np"]} | options
    argv = [built("llama_cpp", BINARY) / BINARY, "-m", model, "--host", "127.0.0.1", "--port", port]
    for flag, value in flags.items():
        argv += [f"-{flag}"] if value == "" else [f"-{flag}", value]
    return list(map(str, argv))


def run(rows: list[dict], model: Path, context: int, options: dict, limit: float, log: Path) -> dict:
    """All rows through as many connections as places: seconds from the first request to the last answer.

    Args:
        rows: with `messages` and `max_tokens`.
        limit: seconds after which the run counts as dead.
        log: file for what the server prints.
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
            is_late = time.perf_counter() - begin >= limit
            late = f"no end after {limit:g} s, {len(answers)} of {len(rows)} rows"
            return {"failed": late if is_late else str(e)}
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
        "version": version(),
    }


@contextmanager
def serving(model: Path, context: int, options: dict, log: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server that has loaded and warmed up: its address, and its process.

    Raises:
        RuntimeError: it died, or loads for too long.
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
    except OSError:  # it does not listen yet, or answers 503 while it loads
        return False


def answer(address: str, row: dict) -> dict:
    """What the server says to one row. Raises OSError, HTTPException."""
    asked = {"messages": row["messages"], "max_tokens": row["max_tokens"], "temperature": 0, "cache_prompt": True}
    headers = {"Content-Type": "application/json"}
    request = Request(f"{address}/v1/chat/completions", json.dumps(asked).encode(), headers)
    with urlopen(request) as response:
        return json.load(response)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def version() -> str:
    sdist = next(built("llama_cpp", BINARY).glob("*.tar.gz")).name
    return f"llama.cpp ({sdist.removesuffix('.tar.gz')})"
