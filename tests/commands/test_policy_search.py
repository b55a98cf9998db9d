"""The command `search`, its contract with scripts, and the policies kept in policies/."""

from __future__ import annotations

import json
import shlex

import pytest
from command_tools import TINY, write_model
from machines import ROOT, T4, laptop

from h2o_flexgen import KVBudget
from h2o_flexgen.commands import generate
from h2o_flexgen.commands.budget import make_budget
from h2o_flexgen.commands.main import main
from h2o_flexgen.commands.options import make_policy
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.policy import GIB, Policy, given_policy

pytest_plugins = ["command_tools"]


T4_FILE = ROOT / "policies" / "hardware" / "t4-16gb.json"


FIELDS = {"model", "policy", "kv_budget", "predicted", "memory_bytes", "bound_by", "command"}


JOB = ("--model", "facebook/opt-1.3b", "--prompt-len", "64", "--gen-len", "8", "--num-prompts", "24")


@pytest.fixture
def hardware(tmp_path):
    path = tmp_path / "laptop.json"
    path.write_text(laptop(dtype="float32").to_json())
    return path


@pytest.fixture
def find(capsys, hardware):
    """Run the command: (exit code, stdout, stderr)."""

    def run(*argv) -> tuple[int, str, str]:
        argv = [str(a) for a in argv]
        if "--hardware" not in argv:
            argv += ["--hardware", str(hardware)]
        capsys.readouterr()
        code = main(["search", *argv])
        return code, *capsys.readouterr()

    return run


def test_json_is_one_object_with_the_promised_fields(find):
    code, out, _ = find(*JOB, "--hh-ratio", 0.2, "--gpu-mem", 2, "--json")
    assert code == 0
    result = json.loads(out)
    assert set(result) == FIELDS
    assert Policy.from_dict(result["policy"])
    assert len(result["policy"]["percent"]) == 6
    assert result["kv_budget"] == {"heavy": 12, "recent": 12, "rule": "voted"}
    assert set(result["predicted"]) == {"prefill_seconds", "decode_seconds", "tokens_per_s"}
    for tier in result["memory_bytes"].values():
        assert 0 <= tier["needed"] <= tier["limit"]
    assert result["bound_by"]
    seconds = result["predicted"]["prefill_seconds"] + result["predicted"]["decode_seconds"]
    block = result["policy"]["gpu_batch_size"] * result["policy"]["num_gpu_batches"]
    assert result["predicted"]["tokens_per_s"] == pytest.approx(min(block, 24) * 8 / seconds)


def test_a_full_cache_has_no_budget(find):
    assert json.loads(find(*JOB, "--json")[1])["kv_budget"] is None


def test_the_output_holds_what_a_user_needs(find):
    code, out, _ = find(*JOB, "--gpu-mem", 2)
    assert code == 0
    for word in ("policy", "prefill", "decode", "predicted", "bound by", "\nRAM  ", "\ndisk  ", "run it"):
        assert word in out


def test_generate_accepts_the_printed_command(find):
    result = json.loads(find(*JOB, "--hh-size", 5, "--gpu-mem", 2, "--json")[1])
    words = shlex.split(result["command"])
    assert words[:2] == ["h2o-flexgen", "generate"]
    args = generate.make_parser("x").parse_args(words[2:])
    assert make_policy(args, None) == Policy.from_dict(result["policy"])
    assert make_budget(args) == KVBudget.from_size(5)
    assert args.device == "cpu"  # the profile's, whatever this machine has


def test_the_output_file_is_a_policy_file(find, tmp_path):
    out = tmp_path / "policy.json"
    assert find(*JOB, "-o", out)[0] == 0
    assert given_policy(out)[0] == Policy.from_dict(json.loads(out.read_text())["policy"])


def test_a_policy_file_has_the_formats_that_its_block_was_planned_with(find, tmp_path):
    out = tmp_path / "policy.json"
    formats = ("--compress-weight", "int4", "--compress-cache", "int8", "--compute", "int8")
    code, _, err = find(*JOB, *formats, "-o", out)
    assert code == 0, err
    assert given_policy(out)[2:] == ("int8", "int4", "int8")
    assert given_policy(out, compress_weight="int8")[3] == "int8"
    assert given_policy(out, compute="exact")[4] == "exact"


def test_with_everything_given_it_only_predicts(find):
    given = ("--gpu-batch-size", 3, "--num-gpu-batches", 2, "--percent", 30, 0, 100, 0, 100, 0, "--no-overlap")
    result = json.loads(find(*JOB, *given, "--json")[1])
    assert Policy.from_dict(result["policy"]) == Policy(3, 2, (30, 0, 100, 0, 100, 0), overlap=False)


def test_a_given_policy_that_does_not_fit_is_predicted_and_refused(find):
    given = ("--gpu-batch-size", 3, "--num-gpu-batches", 2, "--percent", 100, 0, 100, 0, 100, 0, "--gpu-mem", 1)
    code, out, err = find(*JOB, *given)
    assert code == 2
    assert "predicted" in out
    assert "RAM is too small" in err


def test_without_a_number_of_prompts_it_takes_the_largest_block(find):
    result = json.loads(find(*JOB[:-2], "--hh-ratio", 0.1, "--json")[1])
    assert result["policy"]["gpu_batch_size"] * result["policy"]["num_gpu_batches"] > 100


def test_hh_ratio_auto_prints_the_trade(find, tmp_path):
    job = ("--model", "facebook/opt-6.7b", "--prompt-len", 512, "--num-prompts", 24, "--gpu-mem", 6)
    kept = tmp_path / "kept.json"
    code, out, _ = find(*job, "--hh-ratio", "auto", "--min-hh-ratio", 0.2, "-o", kept)
    assert code == 0 and "=>" in out and "full" in out
    result = json.loads(kept.read_text())
    assert set(result) == FIELDS | {"curve"}
    free = [p for p in result["curve"] if p["tokens_per_s"] >= 0.97 * result["curve"][0]["tokens_per_s"]]
    slots = result["kv_budget"]["heavy"] + result["kv_budget"]["recent"] if result["kv_budget"] else None
    assert slots is None or slots == free[-1]["slots"]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--model", "facebook/opt-9b"), "cannot get the model 'facebook/opt-9b'"),
        (("--prompt-len", 0), "--prompt-len: must be 1 or more"),
        (("--prompt-len", 2040, "--gen-len", 32), "longer than the model's 2048 positions"),
        (("--gpu-mem", -1), "--gpu-mem: must be more than 0"),
        (("--max-latency", 0), "--max-latency: must be more than 0"),
        (("--hh-ratio", 2), "--hh-ratio must lie in"),
        (("--hh-ratio", "some"), "--hh-ratio"),
        (("--hh-ratio", "auto", "--hh-size", 3), "--hh-ratio auto sizes the whole"),
        (("--hh-ratio", "auto", "--min-hh-ratio", 0), "--min-hh-ratio"),
        (("--hh-ratio", "auto", "--min-hh-ratio", 0.6), "--min-hh-ratio must lie in"),
        (("--percent", 1, 2, 3, 4, 5, 6, "--max-latency", 9), "--percent contradicts --max-latency"),
        (("--min-hh-ratio", 0.2), "--min-hh-ratio is the floor of --hh-ratio auto"),
        (("--dtype", "float32"), "--device and --dtype are for this machine"),
        (("--compress-weight", "auto", "--max-loss", 1, "--quality", T4_FILE), "does not go with --quality"),
        (("--compute", "int8"), "add --compress-weight int8 or int4"),
        (("-o", "x.json", "--hardware", "./x.json"), "--hardware and --output name the same file"),
        (("--hardware", "/nowhere/x.json"), "cannot read the hardware profile"),
        (("-o", "/nowhere/policy.json"), "the folder /nowhere does not exist"),
    ],
)
def test_bad_options_of_a_search(find, options, message):
    code, out, err = find(*JOB, *options)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert out == ""
    assert "Traceback" not in err


def test_where_nothing_fits_it_says_how_large_the_model_is(find):
    code, out, err = find(*JOB, "--disk-mem", 0.1, "--gpu-mem", 1)
    assert code == 2
    assert "1,316 M parameters" in out and "is too small" in err


def test_the_command_names_formats_and_matmuls(find):
    code, out, err = find(*JOB, "--compress-weight", "int4", "--compute", "int8", "--json")
    assert code == 0, err
    assert "--compress-weight int4 --compute int8" in json.loads(out)["command"]


def test_auto_searches_with_every_format_of_weights_and_cache(find):
    """Each is predicted as if it were the only one."""
    formats = [(weights, cache) for weights in ("int8", "int4") for cache in (None, "int8", "int4")]
    asked = ("--hh-ratio", 0.2, "--gpu-mem", 1, "--compute", "int8")  # int8 matmuls need quantised weights
    code, out, err = find(*JOB, *asked, "--compress-weight", "auto", "--compress-cache", "auto")
    assert code == 0, err
    lines = [line.removeprefix("=>").split() for line in out.splitlines()[1:7]]
    assert [tuple(line[:2]) for line in lines] == [(weights, cache or "floats") for weights, cache in formats]
    assert lines[0][-1] == "1.00x"
    for (weights, cache), line in zip(formats, lines):
        given = ("--compress-weight", weights, *(("--compress-cache", cache) if cache else ()))
        code, out, err = find(*JOB, *asked, *given, "--json")
        assert f"{json.loads(out)['predicted']['tokens_per_s']:.2f}" == line[-2], err


def test_auto_leaves_out_what_a_model_cannot_have(find, tmp_path):
    folder = write_model(tmp_path / "m", config=TINY | {"hidden_size": 12, "ffn_dim": 20})
    output = tmp_path / "found.json"
    code, out, err = find(
        "--model", folder, "--prompt-len", 8, "--gen-len", 4, "--compress-weight", "auto", "-o", output
    )
    assert code == 0, err
    curve = json.loads(output.read_text())["curve"]
    assert {point["compress_weight"] for point in curve} == {None, "int8"}


def test_a_checkpoint_counts_in_its_own_type(find, tmp_path):
    def slots(dtype):
        folder = write_model(tmp_path / dtype, config={**TINY, "torch_dtype": dtype})
        given = ("--gpu-batch-size", 1, "--num-gpu-batches", 1, "--percent", 0, 0, 100, 0, 100, 0)
        code, out, err = find("--model", folder, "--prompt-len", 8, "--gen-len", 4, *given, "--json")
        assert code == 0, err
        assert "--dtype float32" in json.loads(out)["command"]
        return json.loads(out)["memory_bytes"]["gpu"]["needed"]

    assert slots("float16") > slots("float32")  # which needs no conversion


@pytest.mark.parametrize("profile, gpu_mem", [(laptop(), 3), (T4, 4)], ids=["cpu", "cuda"])
def test_a_block_takes_what_the_job_that_runs_it_takes(find, tmp_path, profile, gpu_mem):
    hardware = tmp_path / "hardware.json"
    hardware.write_text(profile.to_json())
    job = ("--model", "facebook/opt-1.3b", "--prompt-len", 64, "--gen-len", 512, "--hh-ratio", 0.5)
    job += ("--gpu-mem", gpu_mem, "--hardware", hardware, "--json")
    code, out, err = find(*job)
    assert code == 0, err
    block = json.loads(out)
    policy = block["policy"]
    sizes = ("gpu_batch_size", "num_gpu_batches", "prefill_tokens")
    given = tuple(word for name in sizes for word in (f"--{name.replace('_', '-')}", policy[name]))
    given += ("--percent", *policy["percent"], "--cpu-cache-compute" if policy["cpu_cache_compute"] else "--json")
    prompts = policy["gpu_batch_size"] * policy["num_gpu_batches"]
    code, out, err = find(*job, "--num-prompts", prompts, *given)
    assert code == 0, err
    assert json.loads(out)["memory_bytes"] == block["memory_bytes"]


KEPT = sorted((ROOT / "policies").glob("t4-*.json"))


@pytest.mark.parametrize("path", KEPT, ids=lambda p: p.stem)
def test_kept_policies_are_still_what_the_search_finds(path, capsys):
    kept = json.loads(path.read_text())
    words = shlex.split(kept["made_by"])
    assert words[:3] == ["python", "-m", "h2o_flexgen.policy_search"]
    args = [str(ROOT / word) if word.startswith("policies/") else word for word in words[3:]]
    if path in KEPT[2::5]:  # at least one of each model, length and cache: a search takes seconds
        assert main(["search", *args, "--json"]) == 0
        now = json.loads(capsys.readouterr().out)
        assert now["kv_budget"] == kept["kv_budget"]
        # two policies may cost the same: what counts is that neither is better
        assert now["predicted"]["tokens_per_s"] == pytest.approx(kept["predicted"]["tokens_per_s"], rel=1e-3)
    policy = kept["policy"]
    given = ["--gpu-batch-size", policy["gpu_batch_size"], "--num-gpu-batches", policy["num_gpu_batches"]]
    given += ["--percent", *policy["percent"], f"--{'' if policy['cpu_cache_compute'] else 'no-'}cpu-cache-compute"]
    assert main(["search", *args, *map(str, given), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["policy"] == kept["policy"] and alone["memory_bytes"] == kept["memory_bytes"]
    assert alone["predicted"] == pytest.approx(kept["predicted"])


def test_every_model_length_and_cache_of_the_papers_is_kept():
    assert len(KEPT) == 18


def test_the_t4_is_a_profile_with_its_sources():
    assert T4.device == "cuda"
    assert Profile.from_file(T4_FILE) == T4
    assert T4.memory["gpu"] <= 16 * GIB
    assert any("fitted" in note for note in json.loads(T4_FILE.read_text())["notes"])
