"""What the runs in docs/benchmarks/throughput_*.json come to: rates, and per system the medians of its whole runs."""

from __future__ import annotations

import json
from collections import Counter
from statistics import median


def speed(run: dict) -> float:
    """Generated tokens per second of the whole job."""
    return run["batch"] * run["gen_len"] / (run["prefill"] + run["decode"])


def summarise(data: dict) -> dict[str, dict]:
    """Of every system of a row: what died ("failed"), whether it is a peer that "dies", and, if it ran to the end,
    medians over the runs with the batch and options that did best. `data`: what the row's file holds."""
    return {system: _of_system(system, data) for system in data["row"]["systems"]}


def rounds(data: dict) -> int:
    """How often all systems of a row have run to the end, peers that never do set apart; at most what the row asks."""
    found = [s.get("runs", 0) for s in summarise(data).values() if "runs" in s or not s["dies"]]
    return min([data["row"]["runs"], *found])


def is_swept(run: dict) -> bool:
    """Whether a run is a block of the frontier."""
    return "block" in run["options"]


def is_superseded(run: dict) -> bool:
    """Whether it was made anew since (`--restart`): kept, and counted no more."""
    return "superseded" in run


def table_runs(data: dict, system: str | None = None) -> list[dict]:
    """Those of a row (of one system) that count and are no blocks of the frontier."""
    runs = [r for r in data["runs"] if not is_swept(r) and not is_superseded(r)]
    return [r for r in runs if system in (None, r["system"])]


def swept_runs(data: dict) -> list[dict]:
    """Those that count and are blocks of the frontier."""
    return [r for r in data["runs"] if is_swept(r) and not is_superseded(r)]


#: how failures begin that no run of the system itself came to
NOT_BUILT = "its operators cannot be built"


def died_of_its_size(failed: str) -> bool:
    """Whether a run died for want of memory or of time, which a smaller one might not."""
    if failed.startswith(NOT_BUILT):
        return False
    words = ("out of memory", "not enough memory", "allocate memory", "memoryerror", "bad_alloc")
    return failed.startswith("no end after") or any(w in failed.lower() for w in words)


def _dies(system: str, data: dict) -> bool:
    """Whether it is a peer that died in a whole run, or at every batch before one."""
    runs = table_runs(data, system)
    failed = [r for r in runs if "failed" in r]
    whole = any(r["gen_len"] == data["row"]["gen_len"] for r in failed)
    return not system.startswith("ours") and bool(failed) and (whole or len(failed) == len(runs))


def _of_system(system: str, data: dict) -> dict:
    runs = table_runs(data, system)
    gen_len = data["row"]["gen_len"]
    alike_in_all = Counter(map(_key, runs))
    done = {_key(r) for r in runs if "failed" not in r}
    # what died of something else and then ran was mended
    died = [r for r in runs if "failed" in r and (_key(r) not in done or died_of_its_size(r["failed"]))]
    failures = Counter((_failure(r, gen_len), alike_in_all[_key(r)]) for r in died)
    found = {"failed": [what + f" ({n} of {of} runs)" * (n < of) for (what, of), n in failures.items()]}
    found["dies"] = _dies(system, data)
    alike: dict[tuple, list[dict]] = {}
    for run in runs:
        if run["gen_len"] == gen_len and "failed" not in run:
            alike.setdefault(_key(run), []).append(run)
    if not alike:
        return found
    # a batch that ran once and then died, or was lucky, does not count against one that ran every time
    asked = data["row"]["runs"]
    best = max(alike.values(), key=lambda group: (min(len(group), asked), median(map(speed, group))))
    found |= {
        "tokens_per_s": median(map(speed, best)),
        "range": [min(map(speed, best)), max(map(speed, best))],
        "prefill_seconds": median(r["prefill"] for r in best),
        "decode_seconds": median(r["decode"] for r in best),
        "batch": best[0]["batch"],
        "options": best[0]["options"],
        "lowest_tier": best[0]["lowest_tier"],
        "runs": len(best),
    }
    bounded = [r for r in best if "floor" in r]
    # the floor of older runs has no attention in it
    bounded = [r for r in bounded if "attention" in r.get("rates_before_and_after", [{}])[0]] or bounded
    if bounded:
        found |= {
            "policy": bounded[0]["report"]["policy"],
            "predicted_over_measured": median(map(_predicted, bounded)),
            "bound_by": max(bounded[0]["floor"], key=bounded[0]["floor"].get),
            "decode_over_floor": median(r["decode"] / max(r["floor"].values()) for r in bounded),
            "decode_read_bytes": median(r["decode_bytes"]["disk_to_cpu"] for r in bounded),
        }
    return found


def _key(run: dict) -> tuple:
    return run["batch"], run["gen_len"], json.dumps(run["options"], sort_keys=True)


def _predicted(run: dict) -> float:
    """Seconds of the whole job, predicted over measured."""
    predicted = run["report"]["predicted"]
    return (predicted["prefill_seconds"] + predicted["decode_seconds"]) / (run["prefill"] + run["decode"])


def _failure(run: dict, gen_len: int) -> str:
    details = [f"batch {run['batch']}", *(f"{k} {v}" for k, v in sorted(run["options"].items()))]
    if run["gen_len"] != gen_len:
        details.append(f"first {run['gen_len']} tokens")
    return f"{', '.join(details)}: {run['failed']}"
