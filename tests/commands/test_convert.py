"""`h2o-flexgen convert`: its checkpoints give the tokens of the same weights compressed at loading."""

from __future__ import annotations

import fcntl
import json
import os
import shutil

import gguf
import pytest
import torch
import zoo
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.commands.main import main
from h2o_flexgen.formats import Int8
from h2o_flexgen.models.inspect import find

SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
ON_DISK = (0, 0, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> zoo.Tiny:
    return zoo.build("llama", tmp_path_factory.mktemp("llama"), **SIZES)


def tokens(path, prompts, **options) -> list[list[int]]:
    with LLM(str(path), Policy(2, 1, ON_DISK), device="cpu", dtype="float32", progress=False, **options) as llm:
        rows = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
        return [row.outputs[0].token_ids for row in rows]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_converted_checkpoint_is_the_compressed_one(llama, tmp_path, kind, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(llama.folder), "--to", kind, "-o", str(out)]) == 0
    assert f"wrote {out}: " in capsys.readouterr().out
    prompts = llama.prompts([9, 4])
    assert tokens(out, prompts) == tokens(llama.folder, prompts, compress_weight=kind)
    assert len(list((tmp_path / "home" / "converted").glob("*/copy.json"))) == 1  # that of `compress_weight`


def test_q4_0_is_ggufs(llama, tmp_path):
    out = tmp_path / "out"
    assert main(["convert", str(llama.folder), "--to", "q4_0", "-o", str(out)]) == 0
    state = load_file(llama.folder / "model.safetensors")
    for name, weight in state.items():
        if weight.dim() == 2 and "layers" in name:
            raw = gguf.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q4_0)
            state[name] = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType.Q4_0))
        elif weight.dim() == 2:
            raw = torch.empty(Int8().nbytes(tuple(weight.shape)), dtype=torch.uint8)
            Int8().encode(weight, raw)
            state[name] = Int8().view(raw, tuple(weight.shape)).to(torch.float32)
    same = tmp_path / "same"
    shutil.copytree(llama.folder, same)
    save_file(state, same / "model.safetensors", metadata={"format": "pt"})
    prompts = llama.prompts([9, 4])
    assert tokens(out, prompts) == tokens(same, prompts)


def test_plans_know_its_formats(llama, tmp_path):
    out = tmp_path / "out"
    main(["convert", str(llama.folder), "--to", "int4", "-o", str(out)])
    formats, copied = find(str(out)).formats(None)
    assert {form.name for form in formats.values()} == {"int8", "int4"} and copied == 0


def test_bad_calls_leave_nothing(llama, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    assert main(["convert", str(llama.folder), "--to", "int4", "-o", str(out)]) == 2
    assert "exists: name a new folder" in capsys.readouterr().err
    broken = tmp_path / "broken"
    shutil.copytree(llama.folder, broken)
    state = load_file(broken / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    assert main(["convert", str(broken), "--to", "int8", "-o", str(tmp_path / "new")]) == 2
    assert "contain NaN or infinite values" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("new*")) == []


def convert(folder, out) -> int:
    return main(["convert", str(folder), "--to", "int8", "-o", str(out)])


def test_what_a_killed_process_left_is_replaced(llama, tmp_path):
    left = tmp_path / ".out.partial"
    left.mkdir()
    (left / "00007.safetensors").write_text("half")
    assert convert(llama.folder, tmp_path / "out") == 0
    assert not left.exists() and [p.name for p in (tmp_path / "out").glob("*7*")] == []


def test_folders_of_others_stay(llama, tmp_path):
    note = tmp_path / "out.partial" / "note.txt"
    note.parent.mkdir()
    note.write_text("mine")
    assert convert(llama.folder, tmp_path / "out") == 0
    assert note.read_text() == "mine"


def test_only_one_process_writes_a_folder(llama, tmp_path, capsys):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "00000.safetensors").write_text("half")
    fd = os.open(partial, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert convert(llama.folder, tmp_path / "out") == 2
    assert "another process is writing" in capsys.readouterr().err
    assert (partial / "00000.safetensors").exists()
    os.close(fd)


@pytest.mark.parametrize(
    "name, cause",
    [
        ("file", "file exists: name a new folder"),
        ("model", "model exists: name a new folder"),
        ("file/out", "Not a directory"),
        ("new/" + "x" * 250, "File name too long"),
        ("/proc/out", "cannot write /proc/out"),
        ("small/out", "is free: name a folder on another disk"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(llama, tmp_path, capsys, monkeypatch, name, cause):
    (tmp_path / "file").write_text("mine")
    shutil.copytree(llama.folder, tmp_path / "model")
    before = sorted(tmp_path.iterdir())
    if "small" in name:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr("h2o_flexgen.engine.model.open_source", lambda *a: pytest.fail("opened the weights"))
    assert convert(tmp_path / "model", tmp_path / name) == 2
    says = capsys.readouterr().err
    assert cause in says and "H2O_FLEXGEN_HOME" not in says
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_that_is_not_there_leaves_no_folders(tmp_path):
    assert convert(tmp_path / "nowhere", tmp_path / "new" / "folder" / "out") == 2
    assert not [*tmp_path.glob("new*")]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_leaves_nothing(llama, tmp_path, capsys, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    assert convert(llama.folder, tmp_path / "out") == 2
    assert f"cannot write {tmp_path}/out: No space left on device" in capsys.readouterr().err
    assert not [*tmp_path.glob("*out*"), *tmp_path.glob(".out*")]


def test_a_checkpoint_that_contradicts_its_config(llama, tmp_path, capsys):
    out = tmp_path / "out"
    main(["convert", str(llama.folder), "--to", "int8", "-o", str(out)])
    config = json.loads((out / "config.json").read_text())
    for kind, message in (("int4", "lacks .* in int4, which its config names"), ("int3", "kind must be one of int8")):
        config["quantization_config"]["kind"] = kind
        (out / "config.json").write_text(json.dumps(config))
        with pytest.raises(Exception, match=message):
            LLM(str(out), device="cpu", progress=False)
