"""Checkpoints of gpt-oss, whose experts lie in one tensor for a layer: in floats and in MXFP4."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
import zoo
from gguf_tools import apart
from quantised_tools import change_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from h2o_flexgen import LLM, Policy, SamplingParams, UserError
from h2o_flexgen.commands.main import main
from h2o_flexgen.engine.model import load_model
from h2o_flexgen.formats import GGUF, Dense, Int8
from h2o_flexgen.formats.forms import names_of
from h2o_flexgen.models import spec as spec_module
from h2o_flexgen.models.gpt_oss import MXFP4
from h2o_flexgen.models.inspect import find
from h2o_flexgen.models.registry import read_method, stored_dtype
from h2o_flexgen.storage.disk import DiskIO

SIZES = dict(hidden_size=64, intermediate_size=96, num_local_experts=5)
BLOCKS = "model.layers.1.mlp.experts.gate_up_proj_blocks"
SCALES = "model.layers.1.mlp.experts.gate_up_proj_scales"
RAM = (100, 0, 100, 0, 100, 0)
DISK = (0, 0, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(the folder of a checkpoint in MXFP4, the tiny model with its values in floats)."""
    root = tmp_path_factory.mktemp("gpt_oss")
    floats = zoo.build("gpt_oss", root / "floats", **SIZES).folder
    packed = shutil.copytree(floats, root / "packed")
    state = load_file(floats / "model.safetensors")
    stored = dict(state)
    random = torch.Generator().manual_seed(0)
    for name in [name for name in state if re.search(r"experts\.\w+_proj$", name)]:
        experts, width, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, width // 32, 16), generator=random).to(torch.uint8)
        scales = torch.randint(123, 127, blocks.shape[:-1], generator=random).to(torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(state, floats / "model.safetensors", metadata={"format": "pt"})
    change_config(packed, quantization_config=MXFP4)
    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32).eval()
    return packed, zoo.Tiny("gpt_oss", model, floats)


@pytest.fixture(params=["mxfp4", "floats"])
def folder(models, request):
    return models[0] if request.param == "mxfp4" else models[1].folder


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """Two experts in a group, and one in the last."""
    monkeypatch.setattr(spec_module, "GROUP_ELEMENTS", 50_000)


def load(folder, **options):
    return load_model(str(folder), None, lambda _: torch.float32, False, **options)


def decoded(model, name: str) -> torch.Tensor:
    stored = model.source.find(name)
    raw = torch.empty(stored.nbytes, dtype=torch.uint8)
    out = stored.format.view(raw, stored.shape)
    model.source.read(name, out, DiskIO())
    return out.to(torch.float32)


def test_experts_are_those_of_transformers_to_the_bit(models, folder):
    model = load(folder)
    expected = apart(load_file(models[1].folder / "model.safetensors"))
    names = [name for layer in model.layers for name in layer.shapes if names_of(name)]
    assert len(names) == 2 * 3 * 6
    for name in names:
        assert torch.equal(decoded(model, name), torch.cat([expected[each] for each in names_of(name)]))
    kept = GGUF["MXFP4"] if folder == models[0] else Dense(torch.float32)
    assert {model.formats[name] for name in names if name in model.formats} == {kept}
    assert model.formats["model.layers.0.mlp.router.weight"].is_dense
    formats, copied = find(str(folder)).formats(None)
    assert copied == model.source.copy_bytes
    assert formats == {name: model.formats[name] for name in formats} and len(formats) == len(names) // 2


def generate(folder, prompts, percent=DISK, **options) -> list[list[int]]:
    options = dict(device="cpu", dtype="float32", progress=False) | options
    with LLM(str(folder), Policy(2, 2, percent=percent), **options) as llm:
        return [
            row.outputs[0].token_ids for row in llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        ]


def test_tokens_are_those_of_transformers_with_the_same_values(models, folder):
    """Prompts and outputs are longer than the window."""
    prompts = models[1].clear_cut_prompts([5, 17, 9], 12)
    expected = [trace.tokens for trace in models[1].references(prompts, 12)]
    for percent in (RAM, DISK):
        assert generate(folder, prompts, percent) == expected


def test_fewer_bits_of_mxfp4(models, tmp_path):
    """With `compress_weight`, and as a checkpoint of its own, whose biases are by groups."""
    prompts = models[1].prompts([5, 17])
    assert main(["convert", str(models[0]), "--to", "int8", "-o", str(tmp_path / "out")]) == 0
    assert {form for name, form in load(tmp_path / "out").formats.items() if "router" not in name} == {Int8()}
    assert generate(tmp_path / "out", prompts) == generate(models[0], prompts, compress_weight="int8")


def test_published_configs_name_no_type(models, tmp_path):
    folder = shutil.copytree(models[1].folder, tmp_path / "model")
    change_config(folder, dtype=None, torch_dtype=None)
    assert stored_dtype(folder) == "bfloat16" == read_method(folder).name


# bad input


def refusal(folder) -> str:
    with pytest.raises(UserError) as e:
        load(folder)
    assert "\n" not in str(e.value)
    return str(e.value)


def one_nan(scales):
    return scales.index_put((torch.tensor(3), torch.tensor(0), torch.tensor(1)), torch.tensor(255, dtype=torch.uint8))


@pytest.mark.parametrize(
    "name, change, message",
    [
        (SCALES, None, f"has no tensor '{SCALES}', though its quantization_config says mxfp4"),
        (BLOCKS, None, f"has no tensor '{BLOCKS}', though"),
        (SCALES, lambda x: x[:, :-2], f"'{SCALES}' in shape [95, 2], the config asks for [96, 2]"),
        (BLOCKS, lambda x: x[:-1], f"'{BLOCKS}' in shape [4, 192, 2, 16], the config asks for 5 experts"),
        (SCALES, lambda x: x[:-1], f"'{SCALES}' in shape [4, 192, 2], the config asks for 5 experts"),
        (SCALES, one_nan, "experts.3.gate_proj.weight' cannot be read as mxfp4: a scale is NaN"),
        (SCALES, lambda x: x.to(torch.int8), "its codes and scales are in torch.uint8, torch.int8"),
        (BLOCKS.replace("blocks", "bias"), None, f"has no tensor '{BLOCKS.replace('blocks', 'bias')}'"),
    ],
)
def test_a_broken_tensor_is_named(models, tmp_path, name, change, message):
    folder = shutil.copytree(models[0], tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    old = state.pop(name)
    if change is not None:
        state[name] = change(old).contiguous()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert message in refusal(folder)


def test_a_config_with_another_number_of_experts(models, folder, tmp_path):
    folder = shutil.copytree(folder, tmp_path / "model")
    change_config(folder, num_local_experts=4)
    assert "the config asks for 4 experts" in refusal(folder)


def test_floats_with_a_config_of_mxfp4(models, tmp_path):
    folder = shutil.copytree(models[1].folder, tmp_path / "model")
    change_config(folder, quantization_config=MXFP4)
    assert refusal(folder).endswith("delete quantization_config from its config.json")
    state = load_file(models[0] / "model.safetensors")
    name = BLOCKS.removesuffix("_blocks")
    state[name] = load_file(models[1].folder / "model.safetensors")[name]
    del state[BLOCKS]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"has '{name}' in floats beside experts in codes" in refusal(folder)
