"""Whatever a user can get wrong ends in one line that says what to do, exit code 2, and nothing touched."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from cli_tools import (
    FP32,
    ON_CPU,
    ON_DISK,
    ON_GPU,
    PROMPTS,
    TINY,
    command,
    environment,
    last_line,
    percent,
    read_rows,
    tiny_state,
    write_model,
    write_prompts,
    write_rows,
)
from safetensors.torch import save_file

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.output import OutputFile
from h2o_flexgen.models import source
from h2o_flexgen.offload.checkpoint import Checkpoint
from h2o_flexgen.offload.disk import File
from h2o_flexgen.policy import Policy

pytest_plugins = ["cli_tools"]

SHORT = ("--prompt-len", "6", "--gen-len", "3", "--num-prompts", "2")


@pytest.fixture
def broken(tmp_path):
    """A model folder of one's own, to break."""
    return write_model(tmp_path / "broken")


@pytest.fixture
def sharded(tmp_path):
    """The same in two shards with an index: (folder, shard files)."""
    return write_sharded(tmp_path / "sharded")


def write_sharded(folder: Path) -> tuple[Path, list[Path]]:
    state = tiny_state()
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    write_model(folder)
    (folder / "model.safetensors").unlink()
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder, [folder / file for file in parts]


def to_bin(folder: Path) -> Path:
    torch.save(tiny_state(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


def cut(path: Path, keep: float) -> None:
    os.truncate(path, int(path.stat().st_size * keep))


# the model


def test_a_folder_that_is_not_there(refused, tmp_path):
    message = refused("--model", tmp_path / "nowhere", *SHORT)
    assert "nowhere" in message and "no such folder" in message


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere-at-all", "a/b/c", "/dev/null"])
def test_a_path_is_never_taken_for_a_hub_name(refused, monkeypatch, name):
    monkeypatch.setattr(source, "_snapshot", lambda name: pytest.fail("asked the hub"))
    assert "no such folder" in refused("--model", name, *SHORT)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model", "not a name/at all!", "", "x" * 300])
def test_a_hub_name_that_cannot_be_had_offline(refused, monkeypatch, tmp_path, name):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    message = refused("--model", name, *SHORT)
    assert name in message
    assert "folder" in message


def test_a_hub_that_cannot_be_reached(refused, monkeypatch, tmp_path):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    message = refused("--model", "facebook/opt-125m", *SHORT)
    assert "no route" in message and "network" in message


def test_offline_in_a_process_of_its_own(tmp_path):
    env = environment(HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1")
    done = subprocess.run(command("--model", "facebook/opt-125m"), env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot get the model 'facebook/opt-125m'")
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize("path", ["nowhere", "/dev/null", "x" * 300])
def test_a_path_of_weights_that_is_no_folder(refused, model, path):
    assert f"--path {path}: no such folder" in refused("--model", model, "--path", path, *SHORT)


@pytest.mark.parametrize("name", ["facebook/opt-9.9b", "llama", "", "nowhere/opt-125m"])
def test_dummy_weights_of_an_unknown_size(refused, name):
    assert "facebook/opt-6.7b" in refused("--model", name, "--path", "_DUMMY_", *SHORT)


def test_dummy_weights_of_no_model(refused):
    assert "_DUMMY_" in refused("--path", "_DUMMY_", *SHORT)


def test_no_demo_model_in_the_installation(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(source, "DEMO_MODEL", tmp_path / "not-shipped")
    assert "--model" in refused(*SHORT)


# config.json


def test_no_config(refused, broken):
    (broken / "config.json").unlink()
    assert "no config.json" in refused("--model", broken, *SHORT)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_config_that_is_no_json_object(refused, broken, text):
    (broken / "config.json").write_bytes(text)
    assert "config.json" in refused("--model", broken, *SHORT)


def test_a_config_that_is_a_folder(refused, broken):
    (broken / "config.json").unlink()
    (broken / "config.json").mkdir()
    assert "config.json" in refused("--model", broken, *SHORT)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_hidden_layers", "ffn_dim", "num_attention_heads", "max_position_embeddings"],
)
@pytest.mark.parametrize("value", ["missing", 0, -1, 2.5, "32", None, True])
def test_a_size_in_the_config_that_is_none(refused, broken, key, value):
    config = {k: v for k, v in TINY.items() if k != key} | ({} if value == "missing" else {key: value})
    (broken / "config.json").write_text(json.dumps(config))
    assert key in refused("--model", broken, *SHORT)


@pytest.mark.parametrize(
    "key, value",
    [
        ("word_embed_proj_dim", 0),
        ("word_embed_proj_dim", "32"),
        ("word_embed_proj_dim", 16.5),
        ("activation_function", "no_such_function"),
        ("activation_function", ["relu"]),
        ("activation_function", None),
        ("eos_token_id", "two"),
        ("eos_token_id", [2, "two"]),
        ("eos_token_id", {"id": 2}),
        ("do_layer_norm_before", "yes"),
        ("enable_bias", 1.5),
        ("tie_word_embeddings", "true"),
    ],
)
def test_another_key_of_the_config_of_a_wrong_type(refused, broken, key, value):
    (broken / "config.json").write_text(json.dumps(TINY | {key: value}))
    message = refused("--model", broken, *SHORT)
    assert key in message or "activation function" in message


def test_another_architecture(refused, broken):
    (broken / "config.json").write_text(json.dumps(TINY | {"model_type": "mamba"}))
    message = refused("--model", broken, *SHORT)
    assert "mamba" in message and "opt" in message and "llama" in message


def test_heads_that_do_not_divide_the_hidden_size(refused, broken):
    (broken / "config.json").write_text(json.dumps(TINY | {"num_attention_heads": 5}))
    message = refused("--model", broken, *SHORT)
    assert "32" in message and "5" in message and "divisible" in message


def test_a_size_that_is_not_the_checkpoints(refused, broken):
    (broken / "config.json").write_text(json.dumps(TINY | {"vocab_size": 130}))
    message = refused("--model", broken, *SHORT)
    assert "embed_tokens" in message and "[128, 32]" in message and "[130, 32]" in message


def test_a_tokenizer_that_cannot_be_read(refused, broken):
    (broken / "tokenizer.json").write_text("{")
    assert "tokenizer" in refused("--model", broken, *SHORT)


# safetensors


def test_no_weights(refused, broken):
    (broken / "model.safetensors").unlink()
    assert "no weights" in refused("--model", broken, *SHORT)


def test_a_missing_shard(refused, sharded):
    folder, shards = sharded
    shards[1].unlink()
    message = refused("--model", folder, *SHORT)
    assert shards[1].name in message and "missing" in message


@pytest.mark.parametrize("keep", [0, 0.0001, 0.01, 0.5, 0.999])
def test_a_file_that_is_cut_short(refused, broken, keep):
    cut(broken / "model.safetensors", keep)
    message = refused("--model", broken, *SHORT)
    assert "model.safetensors" in message and "download it again" in message


def test_a_shard_that_is_cut_short(refused, sharded):
    folder, shards = sharded
    cut(shards[0], 0.9)
    message = refused("--model", folder, *SHORT)
    assert shards[0].name in message and "cut short" in message


def write_header(path: Path, header: bytes, data: bytes = b"\0" * 64) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(**changes) -> bytes:
    return json.dumps({"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}).encode()


@pytest.mark.parametrize(
    "header",
    [
        b"garbage!",
        b"\xff\xfe\xfd\xfc",
        b"[]",
        b"7",
        b'"text"',
        b"null",
        b'{"t": []}',
        b'{"t": 5}',
        b'{"t": {"dtype": "F32"}}',
        b"[" * 100_000,
        entry(data_offsets=[0, "x"]),
        entry(data_offsets=5),
        entry(data_offsets=[0]),
        entry(data_offsets=[16, 0]),
        entry(data_offsets=[-16, 0]),
        entry(data_offsets=[0, 15]),
        entry(data_offsets=[0.0, 16.0]),
        entry(shape=[8]),
        entry(shape=["4"]),
        entry(shape=[-4]),
        entry(shape=4),
        entry(dtype=["F32"]),
        entry(dtype=5),
    ],
)
def test_a_garbage_header(refused, broken, header):
    write_header(broken / "model.safetensors", header)
    message = refused("--model", broken, *SHORT)
    assert "model.safetensors" in message and "download it again" in message


def test_a_header_longer_than_the_file(refused, broken):
    (broken / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    assert "model.safetensors" in refused("--model", broken, *SHORT)


def test_weights_that_are_a_folder(refused, broken):
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").mkdir()
    assert "model.safetensors" in refused("--model", broken, *SHORT)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "[" * 100_000])
def test_a_garbage_shard_index(refused, sharded, text):
    folder, _ = sharded
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused("--model", folder, *SHORT)


def test_a_missing_tensor(refused, tmp_path):
    state = tiny_state()
    del state["model.decoder.layers.1.fc1.weight"]
    folder = write_model(tmp_path / "missing", state)
    assert "no tensor 'model.decoder.layers.1.fc1.weight'" in refused("--model", folder, *SHORT)


def test_a_tensor_of_a_wrong_shape(refused, tmp_path):
    state = tiny_state()
    state["model.decoder.layers.1.fc1.weight"] = torch.zeros(32, 64)
    folder = write_model(tmp_path / "shape", state)
    message = refused("--model", folder, *SHORT)
    assert "decoder.layers.1.fc1.weight" in message and "[32, 64]" in message and "[64, 32]" in message


def test_a_tensor_of_a_type_that_is_no_float(refused, tmp_path):
    state = tiny_state()
    state["model.decoder.layers.1.fc1.weight"] = torch.zeros(64, 32, dtype=torch.int8)
    folder = write_model(tmp_path / "int8", state)
    message = refused("--model", folder, *SHORT)
    assert "decoder.layers.1.fc1.weight" in message and "I8" in message


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("home", [ON_GPU, ON_CPU, ON_DISK], ids=["gpu", "cpu", "disk"])
def test_weights_that_are_not_finite(refused, tmp_path, home, number):
    state = tiny_state()
    state["model.decoder.layers.1.self_attn.v_proj.weight"][3, 5] = number
    folder = write_model(tmp_path / "nan", state)
    message = refused("--model", folder, *percent(home), *FP32, *SHORT, early=False)
    assert "decoder.layers.1.self_attn.v_proj.weight" in message and "NaN" in message


@pytest.mark.parametrize("name", ["embed_tokens", "embed_positions"])
def test_an_embedding_on_disk_that_is_not_finite(refused, tmp_path, name):
    state = tiny_state()
    state[f"model.decoder.{name}.weight"][:] = float("nan")
    folder = write_model(tmp_path / "nan", state)
    message = refused("--model", folder, *percent(ON_DISK), *FP32, *SHORT, early=False)
    assert name in message


# .bin


@pytest.mark.parametrize("keep", [0, 0.01, 0.5, 0.99])
def test_a_bin_that_is_cut_short(refused, broken, tmp_path, keep):
    cut(to_bin(broken), keep)
    message = refused("--model", broken, *SHORT, early=False)
    assert "pytorch_model.bin" in message and "Download it again" in message
    assert list((tmp_path / "home" / "converted").glob("*/")) == []


@pytest.mark.parametrize("content", [b"garbage", b"\x80\x04garbage", b"PK\x03\x04 no zip"])
def test_a_garbage_bin(refused, broken, tmp_path, content):
    to_bin(broken).write_bytes(content)
    assert "pytorch_model.bin" in refused("--model", broken, *SHORT, early=False)
    assert list((tmp_path / "home" / "converted").glob("*/")) == []


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("old_format", [False, True], ids=["zip", "legacy"])
def test_code_in_a_bin_does_not_run(refused, broken, tmp_path, old_format):
    path, proof = to_bin(broken), tmp_path / "proof"
    state = tiny_state() | {"payload": Payload(proof)}
    torch.save(state, path, _use_new_zipfile_serialization=not old_format)
    assert "pytorch_model.bin" in refused("--model", broken, *SHORT, early=False)
    assert not proof.exists()


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"model": {"w": torch.zeros(2)}}, {1: torch.zeros(2)}, 5])
def test_a_bin_of_something_else(refused, broken, content):
    torch.save(content, to_bin(broken))
    assert "pytorch_model.bin does not hold a dict of tensors" in refused("--model", broken, *SHORT, early=False)


def test_no_space_to_convert_a_bin(refused, broken, tmp_path, monkeypatch):
    import safetensors.torch

    def full(*args, **kwargs):
        safetensors.torch.serialize_file({}, "/dev/full/no", None)  # what safetensors raises when it cannot write

    to_bin(broken)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert "convert" in refused("--model", broken, *SHORT, early=False)
    assert list((tmp_path / "home" / "converted").glob("*/")) == []


def test_nowhere_to_convert_a_bin(refused, broken, tmp_path, monkeypatch):
    to_bin(broken)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path / "file" / "home"))
    assert "convert" in refused("--model", broken, *SHORT)


# numbers on the command line


@pytest.mark.parametrize(
    "numbers, say",
    [
        (("60", "50", "100", "0", "100", "0"), "exceeds 100"),
        (("100", "0", "100", "1", "100", "0"), "exceeds 100"),
        (("100", "0", "100", "0", "50", "50.5"), "exceeds 100"),
        (("-1", "0", "100", "0", "100", "0"), "between 0 and 100"),
        (("100", "0", "0", "-5", "100", "0"), "between 0 and 100"),
        (("101", "0", "100", "0", "100", "0"), "between 0 and 100"),
        (("nan", "0", "100", "0", "100", "0"), "between 0 and 100"),
        (("100", "0", "100", "0", "inf", "0"), "between 0 and 100"),
        (("100", "0", "100", "0", "100"), "6 arguments"),
        (("100", "0", "100", "0", "100", "0", "0"), "unrecognized"),
        (("a", "0", "100", "0", "100", "0"), "invalid float"),
    ],
)
def test_percentages(refused, model, numbers, say):
    message = refused("--model", model, *SHORT, "--percent", *numbers)
    assert say in message


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "", "nan", "inf", "1e3"])
@pytest.mark.parametrize(
    "option", ["--gen-len", "--prompt-len", "--num-prompts", "--gpu-batch-size", "--num-gpu-batches"]
)
def test_sizes(refused, model, option, value):
    assert option in refused("--model", model, option, value)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x"])
@pytest.mark.parametrize("option", ["--gpu-mem", "--cpu-mem", "--disk-mem"])
def test_memory_caps(refused, model, option, value):
    assert option in refused("--model", model, *SHORT, option, value)


@pytest.mark.parametrize(
    "option, value",
    [
        ("--hh-ratio", "-0.1"),
        ("--hh-ratio", "1.1"),
        ("--hh-ratio", "nan"),
        ("--hh-ratio", "inf"),
        ("--recent-ratio", "-1"),
        ("--recent-ratio", "20"),
        ("--recent-ratio", "nan"),
        ("--hh-size", "-1"),
        ("--hh-size", "2.5"),
        ("--recent-size", "-7"),
        ("--recent-size", "x"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-k", "-1"),
        ("--top-k", "0.5"),
        ("--top-p", "0"),
        ("--top-p", "-0.5"),
        ("--top-p", "1.5"),
        ("--top-p", "nan"),
        ("--seed", "-1"),
        ("--seed", "1.5"),
        ("--seed", str(1 << 200)),
    ],
)
def test_other_numbers(refused, model, option, value):
    message = refused("--model", model, *SHORT, option, value)
    assert option.strip("-").replace("-", "_") in message.replace("-", "_")


@pytest.mark.parametrize(
    "options",
    [
        ("--hh-size", "0", "--recent-size", "0"),
        ("--hh-ratio", "0", "--recent-ratio", "0"),
        ("--hh-size", "0"),
        ("--hh-ratio", "0"),
        ("--hh-ratio", "0", "--recent-size", "0"),
    ],
)
def test_an_empty_budget(refused, model, options):
    assert "budget is empty" in refused("--model", model, *SHORT, *options)


@pytest.mark.parametrize("option, value", [("--device", "tpu"), ("--device", "meta"), ("--device", "cuda:99")])
def test_a_device_that_is_not_there(refused, model, option, value):
    assert "device" in refused("--model", model, *SHORT, option, value)


def test_an_unknown_dtype(refused, model):
    assert "float16" in refused("--model", model, *SHORT, "--dtype", "int8")


@pytest.mark.parametrize("argv", [("--no-such-option",), ("--gen",), ("--gen-len",), ("word",), ("--overlap=3",)])
def test_unknown_options(refused, model, argv):
    assert "--help" in refused("--model", model, *argv)


@pytest.mark.parametrize(
    "prompt_len, gen_len", [("60", "5"), ("65", "1"), ("1", "64"), (str(10**12), "1"), ("1", str(10**12))]
)
def test_longer_than_the_positions(refused, model, prompt_len, gen_len):
    message = refused("--model", model, "--prompt-len", prompt_len, "--gen-len", gen_len)
    assert "64 positions" in message


def test_as_long_as_the_positions_is_fine(cli, model, tmp_path):
    code, _, err = cli("--model", model, "--prompt-len", 60, "--gen-len", 4, "--num-prompts", 1, "--ignore-eos")
    assert code == 0, err


# contradictory options


def test_contradictory_options(refused, model, tmp_path):
    policy = tmp_path / "policy.json"
    policy.write_text(Policy().to_json())
    rows = write_prompts(tmp_path / "in.jsonl")
    six = percent(ON_GPU)
    for argv in (
        (*six, "--policy", "auto"),
        (*six, "--policy", policy),
        ("--gpu-batch-size", "2", "--policy", policy),
        ("--num-gpu-batches", "2", "--policy", policy),
        ("--no-overlap", "--policy", policy),
        ("--overlap", "--policy", policy),
        ("--cpu-cache-compute", "--policy", policy),
        ("--input-file", rows, "--prompt-len", "8"),
        ("--input-file", rows, "--num-prompts", "8"),
    ):
        message = refused("--model", model, *argv)
        assert argv[0] in message or argv[-2] in message


@pytest.mark.parametrize(
    "pair", [("--output-file", "--report"), ("--input-file", "--output-file"), ("--input-file", "--report")]
)
def test_one_file_for_two_things(refused, model, tmp_path, pair):
    rows = write_prompts(tmp_path / "rows.jsonl")
    (tmp_path / "link").symlink_to(rows)
    before = rows.read_text()
    message = refused("--model", model, pair[0], rows, pair[1], tmp_path / "link", files=False)
    assert pair[0] in message and pair[1] in message
    assert rows.read_text() == before


# files


@pytest.mark.parametrize("option", ["--output-file", "--report"])
@pytest.mark.parametrize("where", ["no/such/folder/out", ".", "file/out", "x" * 300])
def test_an_output_that_cannot_be_written(refused, model, tmp_path, monkeypatch, option, where):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file")
    assert f"{option} {where}" in refused("--model", model, *SHORT, option, where, files=False)


@pytest.mark.parametrize("option", ["--output-file", "--report"])
def test_an_output_behind_a_link_that_cannot_be_written(refused, model, tmp_path, option):
    (tmp_path / "link").symlink_to(tmp_path / "unmounted" / "out")
    message = refused("--model", model, *SHORT, option, tmp_path / "link", files=False)
    assert f"the folder {tmp_path / 'unmounted'} does not exist" in message


def test_an_output_that_another_job_writes(refused, model, tmp_path):
    first = OutputFile(str(tmp_path / "out.jsonl"))
    first.add({"index": 0})
    message = refused("--model", model, *SHORT, "--output-file", tmp_path / "out.jsonl", files=False)
    assert message.endswith("another job is writing it")
    first.finish(whole=True)
    both = [OutputFile(str(tmp_path / "out.jsonl")) for _ in range(2)]  # started at once
    both[0].add({"index": 0})
    with pytest.raises(UserError, match="another job is writing it"):
        both[1].add({"index": 0})
    assert len(read_rows(both[0].partial)) == 1


def test_an_output_on_a_read_only_file_system(refused, model, read_only):
    message = refused("--model", model, *SHORT, "--output-file", read_only / "out", files=False)
    assert "cannot be written" in message
    message = refused("--model", model, *SHORT, "--report", read_only / "out", files=False)
    assert "cannot be written" in message


def test_an_output_that_is_no_file(refused, model, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "--output-file" in refused("--model", model, *SHORT, "--output-file", fifo, files=False)
    assert fifo.is_fifo()


@pytest.mark.parametrize(
    "text, say",
    [
        (None, "cannot read"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "JSON object"),
        (b'{"gpu_batch_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"policy": 5}', "JSON object"),
        (b'{"policy": [1]}', "JSON object"),
        (b'{"gpu_batch_sise": 4}', "gpu_batch_sise"),
        (b'{"gpu_batch_size": 0}', "gpu_batch_size"),
        (b'{"gpu_batch_size": 2.5}', "gpu_batch_size"),
        (b'{"gpu_batch_size": true}', "gpu_batch_size"),
        (b'{"num_gpu_batches": null}', "num_gpu_batches"),
        (b'{"overlap": "yes"}', "overlap"),
        (b'{"percent": [100, 0, 100, 0, 100]}', "six"),
        (b'{"percent": [100, 0, 100, 0, 100, "0"]}', "percent"),
        (b'{"percent": [100, 0, 100, 0, 100, true]}', "percent"),
        (b'{"percent": [100, 0, 100, 0, 100, NaN]}', "percent"),
        (b'{"percent": [100, 50, 100, 0, 100, 0]}', "exceeds 100"),
        (b'{"percent": 100}', "percent"),
    ],
)
def test_policy_files(refused, model, tmp_path, text, say):
    path = tmp_path / "policy.json"
    if text is not None:
        path.write_bytes(text)
    message = refused("--model", model, *SHORT, "--policy", path)
    assert say in message and "policy.json" in message


# prompts


@pytest.mark.parametrize("content", [b"", b"\n \n\n", b"\xff\xfe\n"], ids=["empty", "blank", "not UTF-8"])
def test_an_input_file_without_prompts(refused, model, tmp_path, content):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    assert "--input-file" in refused("--model", model, "--input-file", path)


def test_an_input_file_that_is_not_there(refused, model, tmp_path):
    assert "--input-file" in refused("--model", model, "--input-file", tmp_path / "none.jsonl")
    assert "--input-file" in refused("--model", model, "--input-file", tmp_path)


#: rows that cannot be run, and a word of the error each gets
BAD_ROWS = [
    ('{"prompt_token_ids": [1, 2', "not JSON"),
    ("garbage", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('{"prompt_token_ids": [' + "9" * 5000 + "]}", "not JSON"),
    ("[1, 2, 3]", "object"),
    ("5", "object"),
    ("null", "object"),
    ('"text"', "object"),
    ("{}", "prompt"),
    ('{"text": "hello"}', "prompt"),
    ('{"prompt_token_ids": []}', "empty"),
    ('{"prompt_token_ids": "1 2"}', "list"),
    ('{"prompt_token_ids": 5}', "list"),
    ('{"prompt_token_ids": null}', "list"),
    ('{"prompt_token_ids": {"1": 2}}', "list"),
    ('{"prompt_token_ids": [128]}', "vocabulary"),
    ('{"prompt_token_ids": [-1]}', "vocabulary"),
    ('{"prompt_token_ids": [3, 100000000000000000000]}', "vocabulary"),
    ('{"prompt_token_ids": [true]}', "whole numbers"),
    ('{"prompt_token_ids": [5.0]}', "whole numbers"),
    ('{"prompt_token_ids": [NaN]}', "whole numbers"),
    ('{"prompt_token_ids": ["5"]}', "whole numbers"),
    ('{"prompt_token_ids": [null]}', "whole numbers"),
    ('{"prompt_token_ids": [[5]]}', "whole numbers"),
    (json.dumps({"prompt_token_ids": [5] * 60}), "64 positions"),
    ('{"prompt": "text, and no tokenizer"}', "tokenizer"),
    ('{"prompt": ""}', "tokenizer"),
    ('{"prompt": 5}', "text"),
    ('{"prompt": null}', "text"),
    ('{"prompt": ["a"]}', "text"),
]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_bad_rows_among_good_ones(cli, model, tmp_path, sampled):
    """A bad row gets its error; the good rows come out as if the bad ones had been good."""
    sampling = ("--temperature", "1.0", "--seed", "7") if sampled else ()
    options = ("--model", model, "--hh-ratio", "0.4", *sampling)
    rows, good, bad = [], [], []
    for n, (row, say) in enumerate(BAD_ROWS):
        bad.append((len(rows), say))
        rows.append(row)
        if n % 6 == 2:
            good.append(len(rows))
            rows.append({"prompt_token_ids": PROMPTS[n // 6]})
    assert len(good) == len(PROMPTS)
    source, target = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    files = ("--input-file", source, "--output-file", target, "--offload-dir", tmp_path / "offload")
    code, out, err = cli(*FP32, *options, *files, "--gen-len", 6)
    assert code == 0, err
    found = read_rows(target)
    assert [row["index"] for row in found] == list(range(len(rows)))
    for index, say in bad:
        assert set(found[index]) == {"index", "error"}
        assert say in found[index]["error"], rows[index]
        assert "\n" not in found[index]["error"] and len(found[index]["error"]) < 300
    whole = [row if n in good else {"prompt_token_ids": PROMPTS[0]} for n, row in enumerate(rows)]
    source = write_rows(tmp_path / "whole.jsonl", whole)
    files = ("--input-file", source, "--output-file", target, "--offload-dir", tmp_path / "offload")
    assert cli(*FP32, *options, *files, "--gen-len", 6)[0] == 0
    expected = read_rows(target)
    for index in good:
        assert found[index] == expected[index]
    assert f"{len(bad)} rows could not be run" in err
    assert "5 prompts" in out


def test_a_row_that_is_not_utf_8(cli, model, tmp_path):
    good = json.dumps({"prompt_token_ids": PROMPTS[0]}).encode()
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([good, '{"prompt": "déjà vu"}'.encode("latin-1"), good]))
    files = ("--input-file", tmp_path / "in.jsonl", "--output-file", tmp_path / "out.jsonl")
    code, _, err = cli("--model", model, *FP32, *files, "--gen-len", 2)
    assert code == 0, err
    rows = read_rows(tmp_path / "out.jsonl")
    assert rows[1] == {"index": 1, "error": "not UTF-8 text"}
    assert rows[0]["token_ids"] == rows[2]["token_ids"] and len(rows) == 3


@pytest.mark.parametrize("row, say", [BAD_ROWS[0], BAD_ROWS[8], BAD_ROWS[10], BAD_ROWS[15], BAD_ROWS[24], BAD_ROWS[25]])
def test_nothing_but_bad_rows(refused, model, tmp_path, row, say):
    message = refused("--model", model, "--gen-len", "6", "--input-file", write_rows(tmp_path / "in.jsonl", [row] * 3))
    assert "none of the 3 rows" in message and say in message


@pytest.mark.parametrize(
    "prompts", [[[]], [""], [[128]], [[-1]], [[True]], [[2.0]], [5], [None], [[5] * 64], [[5], "text"]]
)
def test_bad_prompts_in_python(model, tmp_path, prompts):
    from h2o_flexgen import LLM, SamplingParams

    with LLM(str(model), device="cpu", progress=False, offload_dir=tmp_path / "offload") as llm:
        with pytest.raises(UserError, match=f"prompt {len(prompts) - 1}: "):
            llm.generate(prompts, SamplingParams(max_tokens=2))
        skipped = llm.generate([[7], *prompts], SamplingParams(max_tokens=2), skip_errors=True)
        assert skipped[-1].error and not skipped[-1].outputs
        assert skipped[0].error is None and skipped[0].outputs[0].token_ids


# memory and disk


def test_a_plan_that_does_not_fit_the_compute_device(refused, model):
    message = refused("--model", model, *SHORT, *percent(ON_GPU), "--gpu-mem", "0.0001")
    assert "gpu tier" in message and f"{int(0.0001 * (1 << 30))} bytes" in message
    needed = int(message.split("(")[1].split(" bytes")[0])
    assert needed > 128_000  # the weights alone


def test_a_plan_that_does_not_fit_the_cpu_tier(refused, model):
    message = refused("--model", model, *SHORT, *percent(ON_CPU), "--cpu-mem", "0.00001")
    assert "cpu tier" in message and f"{int(0.00001 * (1 << 30))} bytes" in message


def test_a_plan_that_does_not_fit_the_disk(refused, model):
    job = ("--prompt-len", "40", "--gen-len", "8", "--gpu-batch-size", "8")
    message = refused("--model", model, *job, *percent(ON_DISK), "--disk-mem", "0.00001")
    assert "disk tier" in message and f"{int(0.00001 * (1 << 30))} bytes" in message
    assert "--offload-dir" in message


def test_nothing_fits_at_all(refused, model):
    assert "tier" in refused("--model", model, *SHORT, "--gpu-mem", "0.0001", "--disk-mem", "0.00001")


def test_a_plan_that_does_not_fit_the_ram(refused, model, monkeypatch):
    from h2o_flexgen.offload import memory

    monkeypatch.setattr(memory, "ram_in_all", lambda: 2 << 20)
    job = ("--prompt-len", "60", "--gen-len", "2", "--gpu-batch-size", "512")
    message = refused("--model", model, *job, *percent(ON_GPU))
    assert "RAM" in message and "bytes" in message


def test_no_space_when_the_files_are_made(refused, model, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = refused("--model", model, *SHORT, *percent(ON_DISK), early=False)
    assert "No space left" in message and "offload_dir" in message


@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
@pytest.mark.parametrize(
    "what, after",
    [
        *((("100", "0", "0", "0", "100", "0"), n) for n in (0, 3, 20)),
        *((("100", "0", "100", "0", "0", "0"), n) for n in (0, 3, 7)),  # activations are written in prefill only
        *((ON_DISK, n) for n in (0, 3, 20)),
    ],
)
def test_no_space_during_the_run(refused, model, monkeypatch, what, after, overlap):
    calls = iter(range(10**9))
    real = os.pwrite

    def full(fd, data, offset):
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    options = ("--prompt-len", "6", "--gen-len", "12", "--gpu-batch-size", "1", "--num-gpu-batches", "2")
    message = refused("--model", model, *options, "--ignore-eos", *percent(what), overlap, early=False)
    assert "No space left" in message and "offload_dir" in message
    assert next(calls) > after


@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
@pytest.mark.parametrize("after", [0, 30])
def test_a_disk_that_stops_reading(refused, model, monkeypatch, overlap, after):
    calls = iter(range(10**9))
    real = os.preadv

    def failing(fd, buffers, offset):
        if next(calls) >= after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    message = refused("--model", model, *SHORT, *percent(ON_DISK), overlap, early=False)
    assert "cannot read" in message and "Input/output error" in message


def test_a_dummy_model_with_no_space_for_its_weights(refused, model, monkeypatch):
    def full(fd, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    message = refused("--model", model, "--path", "_DUMMY_", *SHORT, *percent(ON_DISK), early=False)
    assert "No space left" in message


def test_a_checkpoint_that_shrinks_while_the_job_runs(refused, broken, monkeypatch):
    """The file is whole when it is checked, and cut short when the weights are read."""
    real = Checkpoint.check

    def check(self, needed):
        real(self, needed)
        cut(broken / "model.safetensors", 0.2)

    monkeypatch.setattr(Checkpoint, "check", check)
    for home in (ON_GPU, ON_DISK):
        message = refused("--model", broken, *SHORT, *percent(home), early=False)
        assert "cut short" in message
        write_model(broken)


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_an_offload_folder_that_cannot_be_made(refused, model, tmp_path, where):
    (tmp_path / "file").write_text("a file")
    message = refused("--model", model, *SHORT, *percent(ON_DISK), "--offload-dir", tmp_path / where, early=False)
    assert "offload folder" in message and "offload_dir" in message


def test_an_offload_folder_of_an_impossible_name(refused, model, tmp_path):
    message = refused("--model", model, *SHORT, *percent(ON_DISK), "--offload-dir", tmp_path / ("x" * 300), early=False)
    assert "offload folder" in message


def test_a_read_only_offload_folder(refused, model, read_only):
    for where in (read_only, read_only / "below"):
        message = refused("--model", model, *SHORT, *percent(ON_DISK), "--offload-dir", where, early=False)
        assert "Read-only file system" in message and "offload_dir" in message


@pytest.fixture
def mount(tmp_path):
    """Mount something on tmp_path/mounted; skips where that is not allowed."""
    target = tmp_path / "mounted"
    target.mkdir()
    mounted = []

    def do(*argv: str) -> Path:
        done = subprocess.run(["mount", *argv, str(target)], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no mount: {done.stderr.strip()}")
        mounted.append(target)
        return target

    yield do
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def read_only(mount):
    return mount("-t", "tmpfs", "-o", "ro,size=1m", "tmpfs")


@pytest.fixture
def small_disk(mount):
    return mount("-t", "tmpfs", "-o", "size=2m", "tmpfs")


def test_a_small_disk(refused, model, small_disk, monkeypatch):
    """A real file system of 2 MiB: the plan sees that it is too small; without the plan the kernel says so."""
    job = ("--model", model, "--prompt-len", "40", "--gen-len", "8", "--gpu-batch-size", "256", *percent(ON_DISK))
    message = refused(*job, "--offload-dir", small_disk)
    assert "disk tier" in message
    monkeypatch.setattr("h2o_flexgen.offload.memory.disk_free", lambda folder: 1 << 40)
    message = refused(*job, "--offload-dir", small_disk, early=False)
    assert "No space left" in message
    assert list(small_disk.iterdir()) == []


def test_a_small_disk_that_holds_the_job(cli, model, small_disk):
    job = ("--model", model, *SHORT, *percent(ON_DISK), "--offload-dir", small_disk)
    code, _, err = cli(*job)
    assert code == 0, err
    assert list(small_disk.iterdir()) == []


def test_leftovers_of_a_killed_job_do_not_count_as_used(cli, model, small_disk):
    """What a killed job left is swept before the free space is counted."""
    left = small_disk / "h2o_flexgen-job-killed"
    left.mkdir()
    (left / "lock").write_text("")
    (left / "kv_cache").write_bytes(b"x" * (2 * 1024 * 1024 - 16384))
    code, _, err = cli("--model", model, *SHORT, *percent(ON_DISK), "--offload-dir", small_disk)
    assert code == 0, err
    assert list(small_disk.iterdir()) == []


def test_an_output_file_system_that_fills_up(cli, model, tmp_path, small_disk):
    """The rows that were finished stay in the partial file; the output file is not made; the job ends cleanly."""
    source = write_prompts(tmp_path / "in.jsonl", [[n] for n in range(3, 9)])
    (small_disk / "filler").write_bytes(b"x" * (2 * 1024 * 1024 - 4096))
    target = small_disk / "out.jsonl"
    options = ("--gpu-batch-size", 1, *percent(ON_DISK), "--offload-dir", tmp_path / "offload", "--ignore-eos")
    code, _, err = cli(
        "--model", model, *FP32, "--gen-len", 63, "--input-file", source, "--output-file", target, *options
    )
    if code == 0:
        pytest.skip("this file system found space all the same")
    assert code == 2
    assert last_line(err).startswith("error: ") and "No space left" in last_line(err)
    assert not target.exists()
    assert list((tmp_path / "offload").iterdir()) == []


def test_rows_wait_while_their_disk_is_full(tmp_path, capsys):
    """And go to the partial file, whole, as soon as there is space."""
    file = OutputFile(str(tmp_path / "out.jsonl"))
    file.add({"index": 0, "text": "first"})
    real, room = file._file, [0, 7]

    class Full:
        def __getattr__(self, name):
            return getattr(real, name)

        def write(self, line):
            space = room.pop(0) if room else len(line)
            if not space:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real.write(line[:space])

    file._file = Full()
    for index in (3, 2):
        file.add({"index": index, "text": "waits"})
    with open(tmp_path / "out.jsonl.partial") as f:
        assert [json.loads(line)["index"] for line in f] == [0]
    assert capsys.readouterr().err.count("No space left on device; the job goes on") == 1
    assert "3 of 3 finished rows are in" in file.where()
    file.add({"index": 1, "text": "last"})
    with open(tmp_path / "out.jsonl.partial") as f:
        assert [json.loads(line)["index"] for line in f] == [0, 3, 2, 1]
    file.finish(whole=True)
    assert [row["index"] for row in read_rows(tmp_path / "out.jsonl")] == [0, 1, 2, 3]
    assert not (tmp_path / "out.jsonl.partial").exists()


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_an_output_file_that_cannot_be_finished(cli, model, tmp_path, monkeypatch, fails):
    """Whatever fails, the output file of before stays as it was and the finished rows can be had."""
    source, target = write_prompts(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    target.write_text("before\n")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((Path, "write_text") if fails == "write" else (os, "replace")), full)
    options = ("--gpu-batch-size", 2, *percent(ON_DISK), "--offload-dir", tmp_path / "offload")
    code, _, err = cli(
        "--model", model, *FP32, "--gen-len", 4, "--input-file", source, "--output-file", target, *options
    )
    assert code == 2
    line = last_line(err)
    assert line.startswith("error: ") and "No space left" in line and "out.jsonl.partial" in line
    with open(target) as f:
        assert f.read() == "before\n"
    with open(tmp_path / "out.jsonl.partial") as f:
        assert len(f.readlines()) == len(PROMPTS)
    left = {p.name for p in tmp_path.iterdir() if p.is_file()}
    assert left == {"in.jsonl", "out.jsonl", "out.jsonl.partial"}
    assert list((tmp_path / "offload").iterdir()) == []


def test_an_error_in_the_run_keeps_the_finished_rows(cli, model, tmp_path, monkeypatch):
    """The disk fills up in the second block: the first block's rows are in the partial file, and the error says so."""
    source, target = write_prompts(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    real = os.pwrite

    def full(fd, data, offset):
        if (tmp_path / "out.jsonl.partial").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    options = ("--gpu-batch-size", 2, *percent(ON_DISK), "--offload-dir", tmp_path / "offload")
    code, _, err = cli(
        "--model", model, *FP32, "--gen-len", 4, "--input-file", source, "--output-file", target, *options
    )
    assert code == 2
    line = last_line(err)
    assert line.startswith("error: ") and "No space left" in line and "out.jsonl.partial" in line
    assert not target.exists()
    assert len(read_rows(tmp_path / "out.jsonl.partial")) == 2
    assert list((tmp_path / "offload").iterdir()) == []


def test_a_file_reports_where_it_ended(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="ended at byte 100"):
        File(path).read_at(memoryview(bytearray(200)), 0)
