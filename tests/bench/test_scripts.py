"""What the measuring scripts make of what they see."""

import pytest

from scripts import bench_search, gpu_check


def event(kind: str, begin: float, end: float, name: str = "") -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin}


def test_of_a_trace_the_time_counts_in_which_copies_run_beside_kernels():
    copies = [event("gpu_memcpy", 0, 4000, "Memcpy HtoD"), event("gpu_memcpy", 3000, 5000, "Memcpy DtoH")]
    within = event("gpu_memcpy", 0, 99000, "Memcpy DtoD")
    found = gpu_check.read_trace([*copies, within, event("kernel", 4000, 12000), event("cpu_op", 0, 99000)])
    assert found["copies_busy_ms"] == 5 and found["kernels_busy_ms"] == 8
    assert found["copies_beside_kernels_ms"] == 1 and found["hidden_of_what_could_be"] == pytest.approx(0.2)
    assert "error" in gpu_check.read_trace(copies)


def test_published_policies_are_those_of_the_papers():
    assert len(bench_search.PAPERS) == 9
    assert {source.split(",")[0] for source, *_ in bench_search.PAPERS} == {"FlexGen", "H2O"}
