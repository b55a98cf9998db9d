"""The comparison of systems: what is run, what counts as a death, and what it all comes to. No system runs."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench import common, run, tables
from bench.job import Job
from bench.rows import ROWS
from bench.systems import SYSTEMS
from bench.systems.flexgen import numpy_weights
from bench.systems.ours import lowest_tier
from bench.systems.zero_inference import zero_settings


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(common, "commit", lambda: "0" * 12)
    return tmp_path / "results"


def took(prefill: float, decode: float, **more) -> dict:
    return {"prefill": prefill, "decode": decode, "lowest_tier": "disk", "batch": 128, "options": {}} | more


class Fake:
    """A runner whose systems answer at once."""

    def __init__(self, *answers: dict):
        self.answers, self.asked = list(answers), []

    def run(self, system, batch, options):
        self.asked.append((system, batch, options))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer | {"batch": batch, "options": options, "date": "2026-11-01", "commit": "a"}


def test_systems_take_turns_with_the_settings_of_the_table():
    runner = Fake(took(1, 1))
    systems = {"Accelerate": (64, {"share": 0.15}), "ours, H2O": (128, {})}
    run.run_row(runner, "1.3b 32+32", systems, 2, None)
    assert runner.asked == [("Accelerate", 64, {"share": 0.15}), ("ours, H2O", 128, {})] * 2


def test_medians_and_ranges_are_of_all_runs_that_came_to_their_end():
    dead = {"failed": "killed (out of memory)"}
    data = run.run_row(
        Fake(took(10, 10), took(10, 30), dead, took(10, 54)), "1.3b 32+32", {"Accelerate": (128, {})}, 4, None
    )
    found = data["systems"]["Accelerate"]
    assert found["runs"] == 3 and found["died"] == ["batch 128: killed (out of memory), 1 run"]
    assert found["tokens_per_s"] == {"median": 128 * 32 / 40, "min": 64.0, "max": 204.8}
    assert (found["prefill_seconds"], found["decode_seconds"]) == (10, 30)


def test_a_dead_peer_is_a_result_that_the_tables_show():
    data = run.run_row(Fake({"failed": "no end after 900 s"}), "1.3b 32+32", {"Accelerate": (64, {})}, 2, None)
    assert data["systems"]["Accelerate"]["runs"] == 0
    assert "| OPT-1.3B, 32 + 32 | Accelerate | 64 |  |  |  | died | 0 |" in tables.throughput_details([data])
    assert "batch 64: no end after 900 s, 2 runs" in tables.throughput_deaths([data])
    assert "| - |" in tables.throughput([data])


def test_what_a_system_tells_beside_its_times_is_kept():
    told = {"policy": "4 x 2, 0 0 100 0 100 0", "bound_by": "disk", "predicted_over_measured": 0.8}
    runs = [
        took(1, 1, date="d", commit="c", **told),
        took(1, 1, date="d", commit="c", **told | {"predicted_over_measured": 1.0}),
    ]
    found = run.summarise(runs, 32)
    assert found["policy"] == told["policy"] and found["predicted_over_measured"] == pytest.approx(0.9)


def test_some_systems_of_a_row_run_anew_and_the_others_stay(results):
    both = {"Accelerate": (64, {}), "ours, H2O": (128, {})}
    run.run_row(Fake(took(1, 1)), "1.3b 32+32", both, 1, "x")
    again = run.run_row(Fake(took(1, 3)), "1.3b 32+32", {"ours, H2O": (128, {})}, 1, "x")
    stored = common.stored("x")["systems"]
    assert {name: s["decode_seconds"] for name, s in stored.items()} == {"Accelerate": 1, "ours, H2O": 3}
    assert again["systems"].keys() == stored.keys()
    (results / "x.json").write_text(json.dumps(common.stored("x") | {"machine": {"cores": 999}}))
    with pytest.raises(SystemExit, match="of another machine"):
        run.run_row(Fake(took(1, 3)), "1.3b 32+32", {"ours, H2O": (128, {})}, 1, "x")


def test_blocks_of_the_frontier_are_swept_down_and_up(results):
    runner = Fake(took(1, 1))
    run.run_frontier(runner, "1.3b 32+32", 2)
    blocks = [batch for system, batch, _ in runner.asked if system == "ours, H2O"]
    assert blocks == [*run.BLOCKS, *run.BLOCKS[::-1]]
    points = common.stored("frontier")["points"]
    assert len(points) == 10 and points[0]["tokens_per_s"] == 128 * 32 / 2


@pytest.mark.parametrize("name", list(ROWS))
def test_every_peer_of_a_row_has_settings_and_the_budget_is_a_fifth(name, monkeypatch):
    monkeypatch.undo()
    row = ROWS[name]
    assert sum(row.kv_budget) == round(0.2 * (row.prompt_len + row.gen_len))
    for system in row.systems:
        batch, options = run.settings(name, system)
        assert batch >= 1 and isinstance(options, dict)


def test_a_job_is_capped_on_its_own_device_only():
    assert ROWS["1.3b 32+32"].cap_bytes("cpu") == 3 << 29 and ROWS["1.3b 32+32"].cap_bytes("cuda") is None
    assert ROWS["cuda 6.7b 512+32"].cap_bytes("cpu") is None


def test_a_run_is_a_process_of_its_own_inside_the_cap_and_leaves_nothing(tmp_path, monkeypatch):
    seen = {}

    class Cap:
        def __init__(self, nbytes):
            seen["cap"] = nbytes

        def run(self, argv, limit, cwd, stdout, stderr):
            seen.update(argv=argv[1:3], limit=limit, cwd=cwd, job=json.loads(Path(argv[3]).read_text()))
            Path(argv[4]).write_text('{"prefill": 1, "decode": 2}')
            return subprocess.CompletedProcess(argv, 0)

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

        killed = lambda self: False

    monkeypatch.setattr(run, "MemoryCap", Cap)
    (tmp_path / "model").mkdir()
    job = Job(
        "accelerate", str(tmp_path / "model"), str(tmp_path / "run"), "bfloat16", "cpu", 4, 2, 1, ram_bytes=1 << 30
    )
    assert run.run_job(job, 900) == {"prefill": 1, "decode": 2}
    assert seen["argv"] == ["-m", "bench.job"] and seen["cwd"] == common.ROOT
    assert (seen["cap"], seen["limit"], seen["job"]["system"]) == (1 << 30, 900, "accelerate")
    assert not Path(job.scratch).exists()

    def thrash(self, argv, limit, **kwargs):
        raise subprocess.TimeoutExpired(argv, limit)

    monkeypatch.setattr(Cap, "run", thrash)
    assert run.run_job(job, 900) == {"failed": "no end after 900 s"}
    failing = lambda self, argv, limit, stdout, **kwargs: (
        stdout.write(f"OSError: no room in {tmp_path}/x"),
        subprocess.CompletedProcess(argv, 1),
    )[1]
    monkeypatch.setattr(Cap, "run", failing)
    assert run.run_job(job, 900) == {"failed": "exit code 1: OSError: no room in SCRATCH/x"}


def test_what_ended_a_process_is_told_in_words():
    assert run.why(-9, True, "") == "killed (out of memory)"
    assert run.why(-9, False, "") == "killed"
    assert run.why(1, False, "a\nb\n\n") == "exit code 1: b"
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert run.why(1, False, f"{error}\n[rank0]: a warning at exit\n") == f"exit code 1: {error}"


@pytest.mark.parametrize(
    "options, says",
    [
        (("--row", "1.3b 32+32", "--runs", "0"), "from 1"),
        ((), "--row names the job"),
        (("--row", "1.3b 64+512", "--system", "transformers"), "names systems of the row"),
        (("--row", "1.3b 32+32", "--batch", "4"), "one for --batch"),
        (("--row", "cuda 30b 512+32", "--system", "ours, H2O"), "needs CUDA"),
    ],
)
def test_options_that_make_no_sense_are_refused(monkeypatch, capsys, options, says):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["run.py", *options])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert says in capsys.readouterr().err + str(ended.value)


def test_options_of_a_trial_are_numbers_or_words():
    assert dict(map(run.parse_option, ["share=0.15", "threads=2", "attention=eager"])) == {
        "share": 0.15,
        "threads": 2,
        "attention": "eager",
    }


def test_every_system_has_a_module_that_runs_a_job():
    import importlib

    for system in SYSTEMS.values():
        assert callable(importlib.import_module(f"bench.systems.{system.module}").run)


def test_deepspeed_is_given_no_setting_that_it_does_not_know(tmp_path):
    config = SimpleNamespace(hidden_size=8, vocab_size=16, word_embed_proj_dim=8)
    job = Job("zero_inference", str(tmp_path), "s", "bfloat16", "cpu", 4, 2, 1, options={"offload": "nvme"})
    # of deepspeed/runtime/swap_tensor/constants.py
    known = {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"}
    assert set(zero_settings(job, config)["aio"]) <= known
    in_ram = replace(job, options={"offload": "cpu"})
    assert zero_settings(in_ram, config)["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize(
    "percent, device, tier",
    [
        ((0, 0, 12, 0, 0, 0), "cpu", "disk"),
        ((100, 0, 100, 0, 100, 0), "cpu", "RAM"),
        ((100, 0, 100, 0, 100, 0), "cuda", "GPU"),
        ((20, 80, 0, 100, 0, 100), "cuda", "RAM"),
        ((100, 0, 50, 0, 100, 0), "cuda", "disk"),
    ],
)
def test_the_lowest_tier_is_that_of_the_policy(percent, device, tier):
    assert lowest_tier(list(percent), device) == tier


def test_a_checkpoint_is_written_as_flexgen_reads_it(tmp_path):
    tensors = {f"model.decoder.{n}": torch.randn(2, 3).half() for n in ("embed_tokens.weight", "final_layer_norm.bias")}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    folder = numpy_weights(tmp_path / "model", tmp_path) / "checkpoint-np"
    written = {path.name: np.load(path) for path in folder.iterdir()}
    assert set(written) == {"decoder.embed_tokens.weight", "decoder.layer_norm.bias"}
    assert np.array_equal(written["decoder.layer_norm.bias"], tensors["model.decoder.final_layer_norm.bias"].numpy())
