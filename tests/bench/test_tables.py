"""The tables of the comparison."""

from bench import tables
from bench.rows import ROWS


def result(row: str, **rates: float | str | None) -> dict:
    """Results of a row from tokens/s by system; None for a system that died."""
    systems = {}
    for name, rate in rates.items():
        found = {"batch": 8, "dates": ["2026-11-01", "2026-11-03"], "runs": 2 if rate else 0, "version": f"{name} 1.0"}
        if rate:
            times = {"median": rate, "min": rate - 1, "max": rate + 1}
            found |= {"tokens_per_s": times, "lowest_tier": "disk", "prefill_seconds": 1.0, "decode_seconds": 2.0}
        else:
            found["died"] = ["batch 8: no end after 900 s, 2 runs"]
        systems[name] = found
    machine = {"cpu": "a processor", "cores": 2, "ram_gib": 8.0, "gpu": None}
    origin = {"machine": machine, "versions": {"torch": "2.0"}, "command": "python -m bench.run"}
    return origin | {"job": ROWS[row].job(), "systems": systems}


OPT = result(
    "opt-1.3b 64+256", **{"Accelerate": 4.0, "ZeRO-Inference": None, "ours, H2O": 40.0, "ours, H2O + int8": 80.0}
)
LLAMA = result(
    "llama-1b 128+128", **{"llama.cpp Q4_0": 5.0, "llama.cpp Q8_0": 6.0, "ours, H2O Q4_0": 30.0, "ours, H2O Q8_0": 20.0}
)


def test_a_row_shows_the_best_file_of_each_system():
    header, _, opt, llama = tables.throughput([OPT, LLAMA]).splitlines()
    assert header.startswith(
        "| model, prompt + output | memory cap | Accelerate | ZeRO-Inference | llama.cpp | ours, H2O"
    )
    assert opt == "| OPT-1.3B, 64 + 256 | 1.5 GiB | 4.0 (8) | - | - | 40.0 (8) | 80.0 (8, H2O + int8) | 20.0x |"
    assert llama == "| Llama-3.2-1B, 128 + 128 | 1 GiB | - | - | 6.0 (8, Q8_0) | 30.0 (8, Q4_0) | - | 5.0x |"


def test_a_peer_that_died_is_shown():
    died = "| ZeRO-Inference | 8 |  |  |  | died |  | 0 | all | batch 8: no end after 900 s, 2 runs |"
    assert died in tables.throughput_details([OPT])
    assert tables.gain(result("opt-1.3b 64+256", **{"Accelerate": None, "ours, H2O": 40.0})) is None


def test_a_peer_that_ran_fewer_tokens_is_marked():
    OPT["systems"]["Accelerate"]["gen_len"] = 64
    details = tables.throughput_details([OPT])
    assert "| Accelerate | 8 | disk | 1.0 | 2.0 | 4.00 (3.00 to 5.00) | 1020.0 | 2 | 64 |  |" in details
    assert "| ours, H2O | 8 | disk | 1.0 | 2.0 | 40.00 (39.00 to 41.00) | 1020.0 | 2 | all |  |" in details


def test_the_provenance_of_a_row():
    versions = "torch 2.0, llama.cpp Q4_0 1.0, llama.cpp Q8_0 1.0, ours, H2O Q4_0 1.0, ours, H2O Q8_0 1.0"
    machine = "a processor, 2 cores, 8 GiB RAM, no GPU"
    assert tables.row_provenance(LLAMA) == f"{machine}; {versions}; 2026-11-01 to 2026-11-03; `python -m bench.run`"


def test_scores_have_their_spreads():
    score = {"mean": 0.5, "error": 0.1, "ratio": 1.04, "ratio_error": 0.02}
    row = {"rule": "h2o", "slots": 8, "heavy": 4, "recent": 4, "kv_bytes": 1, "scores": {"right": score}}
    (found,) = tables.scores_by_budget({"workload": {"task": "choice"}, "rows": [row]})
    assert (found["rule"], found["slots"], found["right"]) == ("h2o", "4 + 4", "50.0% ± 10.0%")
    (found,) = tables.scores_by_budget({"workload": {"task": "lengths"}, "rows": [row | {"ended": 0.25}]})
    assert (found["right"], found["ended"]) == ("0.5, 1.04 ± 0.02", "25%")
