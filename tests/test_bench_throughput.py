"""The benchmark of systems side by side: what it runs, what it keeps, and what it makes of the runs. No system runs."""

import os
import subprocess
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import bench_common
import bench_systems
import bench_throughput
import make_tables
import numpy as np
import pytest
import torch
from bench_throughput import ROWS, Bench, TimeIsOver, is_result, why
from safetensors.torch import save_file
from throughput_rows import died_of_its_size, summarise

OOM = {"failed": "killed (out of memory)"}
FULL_DISK = {"failed": "exit code 1: OSError: [Errno 28] No space left on device"}


def ALL(run):
    return True


def took(prefill: float, decode: float, **more) -> dict:
    return {"prefill": prefill, "decode": decode, "lowest_tier": "disk", **more}


class Fake(Bench):
    """A row whose systems answer at once."""

    def __init__(self, answer, name="1.3b 32+32", **kwargs):
        super().__init__(name, ROWS[name], None, **kwargs)
        self.answer, self.asked = answer, []

    def _in_a_process(self, system, batch, gen_len, options, limit):
        self.asked.append((system, batch, gen_len, options))
        return self.answer(batch, gen_len, options)


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_common, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_common, "LOCK", tmp_path)
    monkeypatch.setattr(bench_common, "commit", cache(lambda: "0" * 12))
    return tmp_path


def test_a_batch_is_doubled_until_it_slows_down_and_options_must_be_clearly_faster():
    def answer(batch, gen_len, options):
        if options:
            return took(0.97, 0.0)
        return took(1.0 if batch <= 32 else 3.0, 0.0)

    bench = Fake(answer)
    assert bench.best("transformers") == (32, {})
    probes = [(batch, options) for _, batch, _, options in bench.asked]
    assert probes == [(16, {}), (32, {}), (64, {}), (32, {"attention": "eager"})]
    faster = Fake(lambda batch, gen_len, options: took(0.5 if options else 1.0, 0.0), restart=ALL)
    assert faster.best("transformers")[1] == {"attention": "eager"}


def test_variants_that_are_clearly_faster_are_tried_together():
    eager, small, large = {"attention": "eager"}, {"share": 0.15}, {"share": 0.25}
    seconds = {(): 1.0, ("attention",): 0.9, ("share",): 0.8, ("attention", "share"): 0.7}
    bench = Fake(lambda batch, _, options: took(seconds[tuple(sorted(options))], 0) if batch == 16 else OOM)
    bench.fill(1, ["Accelerate"])
    tried = [options for _, batch, gen_len, options in bench.asked if batch == 16 and gen_len == 8]
    assert tried == [{}, eager, large, small, eager | large]
    assert bench.asked[-1] == ("Accelerate", 16, 32, eager | large)


@pytest.mark.parametrize("together", [0.92, 0.96])
def test_variants_that_are_a_little_faster_are_tried_together(together):
    eager, small, large = {"attention": "eager"}, {"share": 0.15}, {"share": 0.25}
    seconds = {(): 1.0, ("attention",): 0.98, ("share",): 0.97, ("attention", "share"): together}

    def answer(batch, _, options):
        slower = 0.01 * (options.get("share") == 0.25)
        return took(seconds[tuple(sorted(options))] + slower, 0) if batch == 16 else OOM

    bench = Fake(answer)
    assert bench.best("Accelerate")[1] == (eager | small if together == 0.92 else {})
    tried = [options for _, batch, _, options in bench.asked if batch == 16]
    assert tried == [{}, eager, large, small, eager | small]


def test_of_variants_that_die_together_the_one_that_takes_memory_goes_first():
    both, one = {"threads": 2, "buffers": 4}, {"threads": 2}

    def answer(batch, gen_len, options):
        if batch > 16 or (gen_len == 32 and "buffers" in options):
            return OOM
        return took(1 - 0.1 * len(options) * ("attention" not in options), 0)

    bench = Fake(answer)
    bench.fill(1, ["ZeRO-Inference"])
    assert [options for *_, gen_len, options in bench.asked if gen_len == 32] == [both, one]


@pytest.mark.parametrize("tier, tried", [("GPU", set()), ("RAM", {"cpu_attention"})])
def test_what_does_something_on_another_tier_only_is_not_tried(tier, tried):
    bench = Fake(lambda batch, *_: took(1, 1, lowest_tier=tier) if batch <= 2 else OOM, name="cuda 6.7b 512+32")
    bench.best("FlexGen")
    assert set().union(*(options for *_, options in bench.asked)) == tried


def test_a_batch_is_halved_until_it_runs_and_a_system_that_never_does_is_left_out():
    small = Fake(lambda batch, gen_len, options: took(1, 1) if batch <= 2 else OOM)
    assert small.best("ZeRO-Inference") == (2, {})
    assert Fake(lambda *_: OOM, restart=ALL).best("ZeRO-Inference") is None


def test_a_smaller_batch_is_not_tried_where_a_peer_died_of_something_else():
    bench = Fake(lambda *_: FULL_DISK)
    assert bench.best("ZeRO-Inference") is None and len(bench.asked) == 1


def test_what_died_of_something_else_waits_for_the_next_benchmark_at_the_same_batch():
    answers = iter([took(1, 1), FULL_DISK])
    first = Fake(lambda batch, gen_len, _: next(answers) if gen_len == 32 else took(1, batch**2))
    first.fill(3, ["transformers"])
    assert [batch for _, batch, gen_len, _ in first.asked if gen_len == 32] == [16, 16]


def test_on_cuda_what_finds_the_placement_is_no_option_to_leave_out_again():
    bench = Fake(lambda batch, *_: took(1, 1) if batch <= 8 else OOM, name="cuda 6.7b 512+32")
    bench.best("Accelerate")
    assert {options["share"] for *_, options in bench.asked} == {0.85, 0.3}


@pytest.mark.parametrize("most, shares", [(32, [0.15]), (16, [0.25, 0.15])])
def test_weights_are_kept_in_ram_only_where_the_whole_cache_leaves_room(most, shares):
    bench = Fake(lambda batch, *_: took(1, 1) if batch <= most else OOM, name="6.7b 64+256")
    assert bench.best("Accelerate")[0] == most
    assert [options["share"] for *_, options in bench.asked if "share" in options] == shares


def test_batches_whose_cache_alone_is_over_the_cap_are_not_tried():
    bench = Fake(lambda batch, gen_len, options: took(1, 1), name="1.3b 64+512")
    bench.best("Accelerate")
    assert max(batch for _, batch, _, _ in bench.asked) == 8


def test_a_whole_run_that_dies_runs_again_without_its_options_and_then_smaller():
    eager = {"attention": "eager"}

    def answer(batch, gen_len, options):
        if gen_len == 32 and (options or batch > 32):
            return OOM
        return took(0.5 if options and batch > 32 else 1.0, 0.0)

    bench = Fake(answer)
    bench.fill(1, ["transformers"])
    whole = [(batch, options) for _, batch, gen_len, options in bench.asked if gen_len == 32]
    assert whole == [(64, eager), (64, {}), (32, {})]
    assert ("transformers", 32, 8, eager) in bench.asked
    found = summarise(bench_common.stored(bench.file))["transformers"]
    assert found["batch"] == 32 and found["runs"] == 1
    assert found["failed"] == ["batch 64, attention eager: killed (out of memory)", "batch 64: killed (out of memory)"]


def test_where_a_whole_run_dies_after_others_the_smaller_batch_runs_as_often_as_asked():
    def answers():
        whole = iter([took(1, 1), OOM, took(1, 1), took(1, 1), took(1, 1)])
        return lambda batch, gen_len, _: OOM if batch > 4 else took(1, 1) if gen_len == 8 else next(whole)

    def whole(bench):
        return [batch for _, batch, gen_len, _ in bench.asked if gen_len == 32]

    first, stopped = Fake(answers()), Fake(answers(), restart=ALL)
    first.fill(3, ["transformers"])
    assert whole(first) == [4, 4, 2, 2, 2]
    stopped.fill(1, ["transformers"])
    stopped.fill(1, ["transformers"])
    after = Fake(lambda *_: took(1, 1))
    after.fill(3, ["transformers"])
    assert whole(stopped) + whole(after) == [4, 4, 2, 2, 2]


def test_a_damaged_file_of_results_is_told_by_name(results):
    (results / "throughput_1.3b_32_32_x.json").write_text('{"row": ')
    with pytest.raises(SystemExit, match="throughput_1.3b_32_32_x.json is damaged"):
        Fake(None)


def test_what_a_killed_build_has_locked_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "py311_cpu" / "async_io").mkdir(parents=True)
    for name in ("lock", "async_io.so"):
        (tmp_path / "py311_cpu" / "async_io" / name).touch()
    bench_throughput.forget_killed_builds()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["async_io.so"]


def test_without_a_cap_a_kill_is_for_want_of_memory_only_if_the_kernel_says_so(monkeypatch):
    kills = 3
    monkeypatch.setattr(bench_common, "oom_kills", lambda path: kills)
    with bench_common.MemoryCap(None) as cap:
        assert not cap.killed()
        kills = 4
        assert cap.killed()


def test_of_the_smaller_batches_those_that_died_are_passed_over_and_options_are_tried_at_the_one_that_runs():
    eager = {"attention": "eager"}

    def answer(batch, gen_len, options):
        if gen_len == 32 and batch > 16:
            return OOM
        return took(0.5 if options and batch == 16 else 1.0, 0.0)

    first = Fake(answer)
    for batch in (64, 32):
        first.run("transformers", batch, 32, {}, 900)
    bench = Fake(answer)
    bench.fill(2, ["transformers"])
    whole = [(batch, options) for _, batch, gen_len, options in bench.asked if gen_len == 32]
    assert whole == [(16, eager), (16, eager)]


@pytest.mark.parametrize("name, quick", [("1.3b 32+32", True), ("30b 64+32", False)])
def test_where_no_best_batch_is_searched_a_death_halves_it_and_no_variant_is_tried(name, quick):
    bench = Fake(lambda batch, *_: OOM if batch > 4 else took(1, 1), name=name, quick=quick)
    bench.fill(1, ["Accelerate"])
    assert bench.asked[-1][1] == 4
    assert not any(options or gen_len == bench_throughput.PROBE for *_, gen_len, options in bench.asked)


def test_a_batch_is_passed_over_only_where_all_its_whole_runs_died_of_their_size():
    answers = {8: [took(1, 1), OOM], 4: [FULL_DISK], 2: [OOM, OOM], 1: [OOM]}
    bench = Fake(lambda batch, *_: answers[batch].pop(0))
    for batch, runs in answers.items():
        for _ in range(len(runs)):
            bench.run("Accelerate", batch, 32, {}, 900)
    assert [bench._died("Accelerate", batch, {}) for batch in (16, 8, 4, 2, 1)] == [False, False, False, True, True]
    assert not bench._died("Accelerate", 2, {"share": 0.15}) and not bench._died("transformers", 2, {})
    assert not Fake(None, restart=lambda run: run["batch"] == 1)._died("Accelerate", 1, {})


def test_a_benchmark_that_was_stopped_goes_on():
    first = Fake(lambda *_: took(1, 2))
    first.fill(2, ["ours, full cache", "ours, H2O"])
    again = Fake(lambda *_: took(1, 2))
    again.fill(3, ["ours, full cache", "ours, H2O"])
    assert len(again.asked) == 2
    assert [run["system"] for run in again.runs[-2:]] == ["ours, full cache", "ours, H2O"]


@pytest.mark.parametrize(
    "failed, asked",
    [("killed (out of memory)", 0), ("no end after 900 s", 0), ("exit code 1: No space left on device", 1)],
)
def test_only_what_died_of_its_size_is_not_tried_again(failed, asked):
    Fake(lambda *_: {"failed": failed}).run("Accelerate", 16, 8, {}, 900)
    again = Fake(lambda *_: took(1, 1))
    again.run("Accelerate", 16, 8, {}, 900)
    assert len(again.asked) == asked


def test_another_machine_has_a_file_of_its_own(results):
    bench = Fake(lambda *_: took(1, 1))
    bench.run("Accelerate", 16, 32, {}, 900)
    here = bench_common.stored(bench.file)
    there = here | {"machine": here["machine"] | {"cores": 999}}
    bench_common.write_json(results / f"{bench.file}.json", there)
    other = Fake(lambda *_: took(1, 1))
    assert other.runs == [] and other.file == f"{bench.file}_2"
    quick = Fake(lambda *_: took(1, 1), quick=True)
    assert quick.best("Accelerate") == (16, {})
    quick.fill(1, ["Accelerate"])
    assert "999 cores" in quick.tables().split("For comparison")[1]
    other.run("Accelerate", 32, 32, {}, 900)
    assert bench_common.stored(bench.file) == there
    again = Fake(lambda *_: took(1, 1))
    assert again.file == other.file and len(again.runs) == 1
    assert Fake(lambda *_: took(1, 1), quick=True).best("Accelerate") == (32, {})


def test_runs_of_another_job_or_version_are_neither_mixed_nor_lost(results):
    bench = Fake(lambda *_: took(1, 1))
    bench.run("Accelerate", 16, 32, {}, 900)
    data = bench_common.stored(bench.file)
    for other, says in (
        ({"row": data["row"] | {"gen_len": 999}}, "the job was another"),
        ({"versions": data["versions"] | {"torch": "0.1"}}, "torch 0.1, here"),
    ):
        bench_common.write_json(results / f"{bench.file}.json", data | other)
        with pytest.raises(SystemExit, match=f"{says}.*--restart"):
            Fake(lambda *_: took(1, 1))
        assert bench_common.stored(bench.file) == data | other
    bench_common.write_json(results / f"{bench.file}.json", data | {"row": data["row"] | {"gen_len": 999}})
    assert Fake(lambda *_: took(1, 1), restart=ALL).runs == []
    bench_common.write_json(results / f"{bench.file}.json", data | {"versions": {"torch": "0.1"}})
    anew = Fake(lambda *_: took(1, 1), restart=ALL)
    anew.run("Accelerate", 16, 32, {}, 900)
    stored = bench_common.stored(bench.file)
    assert [run.get("versions") for run in stored["runs"]] == [{"torch": "0.1"}, None]
    assert stored["versions"] == data["versions"]


def test_some_systems_of_a_row_can_begin_anew_and_earlier_runs_stay_but_do_not_count():
    bench = Fake(lambda *_: took(1, 1))
    bench.run("Accelerate", 16, 32, {}, 900)
    bench.run("ours, H2O", 128, 32, {"h2o": True}, 900)
    again = Fake(lambda *_: took(1, 3), restart=lambda run: run["system"] == "ours, H2O")
    again.fill(1, ["ours, H2O"])
    assert len(again.asked) == 1
    runs = bench_common.stored(bench.file)["runs"]
    assert [(run["system"], "superseded" in run) for run in runs] == [
        ("Accelerate", False),
        ("ours, H2O", True),
        ("ours, H2O", False),
    ]
    found = summarise(bench_common.stored(bench.file))["ours, H2O"]
    assert (found["runs"], found["decode_seconds"]) == (1, 3)
    Fake(lambda *_: took(1, 3)).fill(1, ["ours, H2O"])  # the one that counts is there
    assert len(bench_common.stored(bench.file)["runs"]) == 3


@pytest.mark.parametrize(
    "options, left",
    [
        ((), []),
        (("--system", "ours, H2O"), [("Accelerate", False), ("ours, H2O", True)]),
        (("--frontier",), [("Accelerate", False), ("ours, H2O", False)]),
        (("--frontier", "--system", "ours, full cache"), "all"),
    ],
)
def test_what_begins_anew_is_what_was_asked_for(monkeypatch, options, left):
    bench = Fake(lambda *_: took(1, 1), name="125m 16+8")
    bench.run("Accelerate", 16, 8, {}, 900)
    bench.run("ours, H2O", 128, 8, {"h2o": True}, 900)
    bench.run("ours, H2O", 128, 8, {"h2o": True, "block": [64, 2]}, 900)
    kept = []

    def note(bench, *_):
        kept.extend((run["system"], "block" in run["options"]) for run in bench.runs if "superseded" not in run)
        raise SystemExit

    monkeypatch.setattr(Bench, "fill", note)
    monkeypatch.setattr(Bench, "frontier", note)
    monkeypatch.setattr(bench_throughput, "installed", lambda systems, asked: systems)
    monkeypatch.setattr(bench_throughput, "MemoryCap", lambda nbytes: nullcontext())
    monkeypatch.setattr("sys.argv", ["bench_throughput.py", "--row", "125m 16+8", "--restart", *options])
    with pytest.raises(SystemExit):
        bench_throughput.main()
    everything = [("Accelerate", False), ("ours, H2O", False), ("ours, H2O", True)]
    assert kept == (everything if left == "all" else left)


@pytest.mark.parametrize(
    "options, says",
    [
        (("--runs", "0"), "from 1"),
        (("--runs", "-1"), "from 1"),
        (("--quick", "--runs", "2"), "no --runs"),
        (("--quick", "--restart"), "--restart"),
        (("--row", "1.3b 64+512", "--system", "transformers"), None),
    ],
)
def test_options_that_would_do_nothing_are_refused(monkeypatch, capsys, options, says):
    monkeypatch.setattr("sys.argv", ["bench_throughput.py", *options])
    with pytest.raises(SystemExit, match=None if says else "transformers in none of these rows: 1.3b 64"):
        bench_throughput.main()
    assert says is None or says in capsys.readouterr().err


def test_one_benchmark_at_a_time():
    with bench_common.alone(), pytest.raises(SystemExit, match="another benchmark"), bench_common.scratch():
        pass
    with bench_common.alone():
        pass


def test_a_scratch_folder_that_cannot_be_written_is_told_by_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("H2O_FLEXGEN_SCRATCH", str(tmp_path / "file"))
    with pytest.raises(SystemExit, match="file .*H2O_FLEXGEN_SCRATCH"), bench_common.scratch():
        pass


def test_a_quick_run_never_searches():
    bench = Fake(lambda *_: took(1, 1), quick=True)
    bench.fill(1, ["Accelerate", "ours, H2O"])
    assert [(batch, gen_len) for _, batch, gen_len, _ in bench.asked] == [(16, 32), (128, 32)]


def test_medians_and_ranges_are_of_the_runs_alike():
    seconds = iter([(10, 10), (10, 30), (10, 54)])
    bench = Fake(lambda *_: took(*next(seconds)))
    bench.fill(3, ["ours, full cache"])
    found = summarise(bench_common.stored(bench.file))["ours, full cache"]
    assert found["runs"] == 3
    assert found["tokens_per_s"] == pytest.approx(128 * 32 / 40)
    assert found["range"] == [pytest.approx(64.0), pytest.approx(204.8)]


def test_the_bound_comes_from_the_runs_that_measured_it():
    predicted = {"prefill_seconds": 8.0, "decode_seconds": 16.0}
    report = {"predicted": predicted, "policy": {"gpu_batch_size": 4}}
    floor, moved = {"disk": 19.0, "compute": 5.0}, {"disk_to_cpu": 7}
    answers = iter([took(10, 20), took(10, 20, report=report, floor=floor, decode_bytes=moved)])
    bench = Fake(lambda *_: next(answers))
    bench.fill(2, ["ours, H2O"])
    found = summarise(bench_common.stored(bench.file))["ours, H2O"]
    assert found["bound_by"] == "disk"
    assert found["decode_over_floor"] == pytest.approx(20 / 19)
    assert found["predicted_over_measured"] == pytest.approx(0.8)


def test_the_frontier_is_no_run_of_the_table(results, monkeypatch):
    monkeypatch.setattr(make_tables, "RESULTS", results)
    bench = Fake(lambda *_: took(1, 1))
    bench.frontier(2, ["Accelerate", "ours, full cache", "ours, H2O"])
    sweep = [[64, 2], [64, 1], [32, 1], [16, 1], [8, 1]]
    assert [o["block"] for s, _, _, o in bench.asked if s == "ours, H2O"] == sweep + sweep[::-1]
    assert {system for system, *_ in bench.asked} == {"ours, full cache", "ours, H2O"}
    assert "tokens_per_s" not in summarise(bench_common.stored(bench.file))["ours, H2O"]
    assert make_tables.load("throughput") == []
    with pytest.raises(SystemExit, match="our systems"):
        bench.frontier(1, ["Accelerate"])


def test_the_time_for_everything_can_be_limited(tmp_path):
    bench = Bench("1.3b 32+32", ROWS["1.3b 32+32"], tmp_path, deadline=0.0)
    with pytest.raises(TimeIsOver, match="time is over"):
        bench._finish(None, 900)


@pytest.mark.parametrize("options, prints", [((), True), (("--frontier",), False)])
def test_where_time_is_over_what_ran_is_printed(monkeypatch, capsys, options, prints):
    def answer(bench, system, batch, gen_len, *_):
        if gen_len < bench.row.gen_len or any(run["gen_len"] == gen_len for run in bench.runs):
            raise TimeIsOver("the time is over")
        return took(1, 1)

    monkeypatch.setattr(Bench, "_in_a_process", answer)
    monkeypatch.setattr(bench_throughput, "MemoryCap", lambda nbytes: nullcontext())
    argv = ["bench_throughput.py", "--row", "1.3b 32+32", "--system", "ours, H2O", *options]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as ended:
        bench_throughput.main()
    assert ended.value.code == bench_throughput.TIME_OVER
    out = capsys.readouterr().out
    assert out.endswith("\nthe time is over\n") and ("| ours, H2O | 128 |" in out) == prints


class Ended:
    """A cap whose process has ended, or does not."""

    def __init__(self, code, says):
        self.code, self.says = code, says

    def run(self, argv, timeout, stdout, stderr):
        if self.code is None:
            raise subprocess.TimeoutExpired(argv, timeout)
        stdout.write(self.says)
        return subprocess.CompletedProcess(argv, self.code)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    peak, killed = (lambda self: 5), (lambda self: True)


@pytest.mark.parametrize(
    "code, says, found",
    [
        (1, "OSError: no room in {folder}/x", {"failed": "exit code 1: OSError: no room in SCRATCH/x"}),
        (-9, "", OOM),
        (None, "", {"failed": "no end after 900 s"}),
    ],
)
def test_a_system_that_dies_is_a_result_without_paths_of_this_machine(tmp_path, monkeypatch, capsys, code, says, found):
    bench = Bench("1.3b 32+32", ROWS["1.3b 32+32"], tmp_path)
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(bench_throughput, "MemoryCap", lambda nbytes: Ended(code, says.format(folder=tmp_path)))
    scratch = str(bench.scratch)
    job = bench_systems.Job("Accelerate", str(tmp_path / "model"), scratch, "bfloat16", "cpu", 4, 2, 1)
    run = bench._finish(job, 900)
    assert run == found | {"commit": "0" * 12} | ({} if code is None else {"cgroup_peak_bytes": 5})
    assert not bench.scratch.exists()  # nor does what a system left there take the disk from the next
    # of what is no result of the system, all that it said is shown
    assert capsys.readouterr().err == (says.format(folder="SCRATCH") + "\n" if code == 1 else "")


@pytest.mark.parametrize(
    "system, gen_len, seen",
    [("Accelerate", 32, ["rate", "run", "rate"]), ("Accelerate", 8, ["run"]), ("ours, full cache", 32, ["run"])],
)
def test_the_disk_is_measured_before_and_after_whole_runs_of_peers(tmp_path, monkeypatch, system, gen_len, seen):
    did = []
    monkeypatch.setattr(bench_throughput, "disk_rate", lambda folder: did.append("rate") or len(did))
    monkeypatch.setattr(Bench, "_finish", lambda *_: did.append("run") or took(1, 1))
    bench = Bench("1.3b 32+32", ROWS["1.3b 32+32"], tmp_path)
    bench.checkpoint = bench.profile = tmp_path
    run = bench.run(system, 4, gen_len, {}, 900)
    assert did == seen
    assert run.get("disk_before_and_after") == ([1, 3] if "rate" in seen else None)


@pytest.mark.parametrize("name", list(ROWS))
def test_the_budget_is_a_fifth_of_prompt_and_output(name):
    row = ROWS[name]
    bench = Fake(None, name=name)
    assert sum(bench.kv_budget) == round(0.2 * (row.prompt_len + row.gen_len))


def test_what_ended_a_process_is_told_in_words():
    assert why(-9, True, "") == "killed (out of memory)"
    assert why(-9, False, "") == "killed"
    assert why(1, False, "a\nb\n\n") == "exit code 1: b"
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert why(1, False, f"{error}\n[rank0]: a warning at exit\n") == f"exit code 1: {error}"
    of_a_rank = f"[rank0]: Traceback (most recent call last):\n[rank0]:   in forward\n[rank0]: {error}\n"
    behind = (
        "TypeError: 'NoneType' object is not callable\n[rank0]:[W1] Warning: destroy_process_group() was not called"
    )
    assert died_of_its_size(why(1, False, of_a_rank + behind))


@pytest.mark.parametrize(
    "system, failed, says",
    [
        ("Accelerate", None, True),
        ("Accelerate", "killed (out of memory)", True),
        ("Accelerate", "exit code 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", True),
        ("Accelerate", "exit code 1: RuntimeError: DefaultCPUAllocator: not enough memory: you tried", True),
        ("Accelerate", "exit code 1: RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("Accelerate", "killed", False),
        ("ZeRO-Inference", "its operators cannot be built (a compiler): no end after 1800 s", False),
        ("ZeRO-Inference", "no end after 1800 s", True),
        ("ours, H2O", "killed (out of memory)", False),
    ],
)
def test_what_a_failure_says_of_its_system(system, failed, says):
    assert is_result({"system": system} | ({"failed": failed} if failed else {})) == says


@pytest.mark.parametrize(
    "failed, says",
    [
        ("exit code 1: No space left on device", []),  # mended since
        ("killed (out of memory)", ["batch 16: killed (out of memory) (1 of 2 runs)"]),
    ],
)
def test_of_runs_alike_that_came_through_only_deaths_for_want_of_memory_are_told(failed, says):
    bench = Fake(lambda *_: took(1, 1))
    bench.run("Accelerate", 16, 32, {}, 900)
    bench.answer = lambda *_: {"failed": failed}
    bench.run("Accelerate", 16, 32, {}, 900)
    assert summarise(bench_common.stored(bench.file))["Accelerate"]["failed"] == says


def test_a_peer_that_died_in_a_probe_alone_is_not_said_to_die():
    bench = Fake(lambda batch, *_: took(1, 1) if batch < 64 else OOM)
    bench.best("ZeRO-Inference")
    assert "died" not in make_tables.throughput([bench_common.stored(bench.file)]).split("Runs that died")[0]
    bench = Fake(lambda *_: OOM, restart=ALL)
    bench.best("ZeRO-Inference")
    assert "| died |" in make_tables.throughput([bench_common.stored(bench.file)])


def test_of_two_batches_that_ran_as_often_as_asked_the_faster_one_is_quoted():
    bench = Fake(lambda batch, *_: took(1, 1))
    for batch, runs in ((64, 3), (32, 4)):
        for _ in range(runs):
            bench.run("Accelerate", batch, 32, {}, 900)
    assert summarise(bench_common.stored(bench.file))["Accelerate"]["batch"] == 64


@pytest.mark.parametrize("gib, batch", [(23, 128), (62, 256), (18, 128), (14, 64)])
def test_where_no_batch_is_looked_for_it_is_the_largest_power_of_two_whose_cache_fits(monkeypatch, gib, batch):
    here = bench_common.machine() | {"ram_gib": gib}
    monkeypatch.setattr(bench_common, "machine", lambda *_: here)
    bench = Fake(lambda *_: took(1, 1), name="30b 64+32")
    assert bench.best("Accelerate") == (batch, {}) and bench.asked == []


def test_deepspeed_is_given_no_setting_that_it_does_not_know(tmp_path):
    config = SimpleNamespace(hidden_size=8, vocab_size=16, word_embed_proj_dim=8)
    job = bench_systems.Job(
        "ZeRO-Inference", str(tmp_path), "s", "bfloat16", "cpu", 4, 2, 1, options={"offload": "nvme"}
    )
    aio = bench_systems.zero_settings(job, config)["aio"]
    # its own, of deepspeed/runtime/swap_tensor/constants.py: others it drops without a word
    known = {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"}
    assert set(aio) <= known


def test_a_row_for_cuda_is_refused_without(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_throughput.py", "--row", "cuda 30b 512+32", "--system", "ours, H2O"])
    with pytest.raises(SystemExit, match="needs CUDA"):
        bench_throughput.main()


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
    assert bench_systems.lowest_tier(list(percent), device) == tier


def test_a_checkpoint_is_written_as_flexgen_reads_it(tmp_path):
    tensors = {f"model.decoder.{n}": torch.randn(2, 3).half() for n in ("embed_tokens.weight", "final_layer_norm.bias")}
    model = tmp_path / "checkpoint"
    model.mkdir()
    save_file(tensors, model / "model.safetensors")
    weights = bench_systems.flexgen_weights(str(model), str(tmp_path / "run"))
    written = {path.name: np.load(path) for path in (weights / "checkpoint-np").iterdir()}
    assert set(written) == {"decoder.embed_tokens.weight", "decoder.layer_norm.bias"}
    assert np.array_equal(written["decoder.layer_norm.bias"], tensors["model.decoder.final_layer_norm.bias"].numpy())


def test_a_result_file_is_whole_or_as_it_was(results, monkeypatch):
    path = results / "x.json"
    bench_common.write_json(path, {"a": 1})
    monkeypatch.setattr("json.dumps", lambda *_, **__: "{" * 10)
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError):
        bench_common.write_json(path, {"a": 2})
    monkeypatch.undo()
    assert path.read_text() == '{\n "a": 1\n}\n' and list(results.iterdir()) == [path]


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "v2"])
def test_the_cap_is_a_memory_cgroup_of_either_version(tmp_path, monkeypatch, v1):
    root = tmp_path / "memory" if v1 else tmp_path
    root.mkdir(exist_ok=True)
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    monkeypatch.setattr(bench_common, "CGROUPS", tmp_path)
    monkeypatch.setattr(bench_common, "SWAPS", tmp_path / "swaps")
    limit, peak, events = (
        ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
        if v1
        else ("memory.max", "memory.peak", "memory.events")
    )
    with bench_common.MemoryCap(1 << 30) as cap:
        (folder,) = root.glob("h2o_flexgen-*")
        assert (tmp_path / "cgroup.subtree_control").read_text() == ("cpu" if v1 else "+memory")
        assert (folder / limit).read_text() == str(1 << 30)
        inside = cap.run(["sh", "-c", "echo $$"], capture_output=True, text=True)
        assert (folder / "cgroup.procs").read_text() == inside.stdout  # it entered before it became the program
        assert cap.peak() is None  # older kernels of version 2 do not tell
        (folder / peak).write_text("12345\n")
        assert cap.peak() == 12345
        for count in (0, 1):
            (folder / events).write_text(f"under_oom 0\noom_kill {count}\n")
            assert cap.killed() == bool(count)
    left, waits = root / "h2o_flexgen-4294967295-a", root / f"h2o_flexgen-{os.getpid()}-a"
    left.mkdir()
    waits.mkdir()
    bench_common.MemoryCap.sweep()
    assert not left.exists() and waits.exists() and folder.exists()  # not what is in use, or will be


@pytest.mark.parametrize("counted", [True, False])
def test_where_swap_would_get_around_the_cap_nothing_runs(tmp_path, monkeypatch, counted):
    monkeypatch.setattr(bench_common, "CGROUPS", tmp_path)
    monkeypatch.setattr(bench_common, "SWAPS", tmp_path / "swaps")
    (tmp_path / "swaps").write_text("Filename Type Size\n/swapfile file 8388604\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    folder = tmp_path / "h2o_flexgen-made"
    folder.mkdir()
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: str(folder))
    if counted:
        (folder / "memory.swap.max").touch()
        bench_common.MemoryCap(1 << 30)
        assert (folder / "memory.swap.max").read_text() == "0"
    else:
        with pytest.raises(SystemExit, match="counts no swap"):
            bench_common.MemoryCap(1 << 30)


def test_without_the_right_to_make_a_cgroup_nothing_runs_uncapped(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_common, "CGROUPS", tmp_path / "none")
    with pytest.raises(SystemExit, match="cannot make a memory cgroup .* takes root"):
        bench_common.MemoryCap(1 << 30)


@pytest.mark.parametrize("gen_len", [2, 3, 5, 40])
def test_the_disk_is_sampled_between_decode_steps_and_the_rest_is_not_counted(monkeypatch, gen_len):
    from h2o_flexgen.engine.schedule import ZigZag

    monkeypatch.setattr(ZigZag, "layers", ZigZag.layers)  # put back afterwards
    seen = []
    monkeypatch.setattr(bench_systems, "disk_rate", lambda folder, piece, least: (seen.append(steps[-1]), 5e8)[1])
    steps = []
    samples = bench_systems.disk_samples(
        bench_systems.Job("ours", "folder", "", "bfloat16", "cpu", 8, gen_len, 2), lambda: None
    )
    for step in ZigZag(gen_len, 3, 2).layers():
        steps.append(step[:2])
    assert steps == [(i, j) for i in range(gen_len) for j in range(3)]
    assert len(samples) == len(seen) == min(bench_systems.SAMPLES, max(0, gen_len - 2))
    assert all(rate == 5e8 for rate, _ in samples)
    assert all(j == 2 and i >= 1 for i, j in seen)  # at the end of a decode step

    report = {
        "prefill": {"seconds": 5.0, "tokens_per_s": 1.0},
        "decode": {"seconds": 10.0, "tokens_per_s": 6.0},
        "total": {"seconds": 15.0, "tokens_per_s": 4.0, "generated_tokens": 60},
    }
    assert bench_systems.without(report, 4.0) == {
        "prefill": {"seconds": 5.0, "tokens_per_s": 1.0},
        "decode": {"seconds": 6.0, "tokens_per_s": 10.0},
        "total": {"seconds": 11.0, "tokens_per_s": 60 / 11, "generated_tokens": 60},
    }
