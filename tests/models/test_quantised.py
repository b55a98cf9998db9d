"""Quantised checkpoints of Hugging Face: their codes and scales are streamed as they are, whatever the method."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import quantised_tools as tools
import torch
import zoo
from int8_oracle import in_blocks
from quantised_tools import CASES, GPTQ, PACKED, change_config
from safetensors.torch import load_file, save_file

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.commands.main import main
from h2o_flexgen.compiled import threads
from h2o_flexgen.engine.model import load_model
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import GGUF, Dense, Int8, Quantised
from h2o_flexgen.kernels.int8 import int8_linear, takes_blocks
from h2o_flexgen.models.inspect import find
from h2o_flexgen.models.quantised import METHODS
from h2o_flexgen.models.quantised.mxfp4 import ggml_blocks
from h2o_flexgen.planning.shapes import ModelData
from h2o_flexgen.storage.disk import DiskIO

RAM = (100, 0, 100, 0, 100, 0)
DISK = (0, 0, 0, 0, 0, 0)
MIXED = (30, 30, 40, 20, 50, 0)
GATE = "model.layers.1.mlp.gate_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(case) -> its tiny checkpoint."""
    root = tmp_path_factory.mktemp("quantised")
    plain = {}
    made = {}

    def get(name: str) -> tools.Checkpoint:
        case = CASES[name]
        if case.variant not in plain:
            plain[case.variant] = zoo.build(case.variant, root / case.variant, **tools.WIDE)
        if name not in made:
            made[name] = tools.build(case, plain[case.variant], root / name)
        return made[name]

    return get


@pytest.fixture
def broken(checkpoint, tmp_path):
    """broken(case, **changes) -> a folder whose tensors of GATE, by suffix, are others; None removes one."""

    def make(name: str, **changes):
        folder = shutil.copytree(checkpoint(name).tiny.folder, tmp_path / "model")
        state = load_file(folder / "model.safetensors")
        for suffix, change in changes.items():
            old = state.pop(f"{GATE}.{suffix}")
            if change is not None:
                state[f"{GATE}.{suffix}"] = change(old).contiguous()
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def load(folder, **options):
    return load_model(str(folder), None, lambda _: torch.float32, False, **options)


def decoded(model, name: str, dtype=torch.float32) -> torch.Tensor:
    stored = model.source.find(name)
    if stored.format.is_dense:
        out = torch.empty(stored.shape, dtype=dtype)
        model.source.read(name, out, DiskIO())
        return out
    return quantised(model, name).to(dtype)


def quantised(model, name: str) -> Quantised:
    stored = model.source.find(name)
    matrix = stored.format.view(torch.empty(stored.nbytes, dtype=torch.uint8), stored.shape)
    model.source.read(name, matrix, DiskIO())
    return matrix


def generate(folder, prompts, dtype="float32", compute="exact", percent=DISK) -> list[list[int]]:
    options = dict(device="cpu", dtype=dtype, compute=compute, progress=False)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(str(folder), Policy(gpu_batch_size=2, percent=percent), **options) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


def refusal(folder, **options) -> str:
    with pytest.raises(UserError) as e:
        load(folder, **options)
    assert "\n" not in str(e.value)
    return str(e.value)


# exact


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_those_of_the_method_to_the_bit(checkpoint, name, monkeypatch):
    made = checkpoint(name)
    model = load(made.tiny.folder)
    for key, expected in made.matrices.items():
        assert model.formats[key].is_dense == (CASES[name].floats is not None)
        for dtype in (torch.float32, torch.float16):
            assert torch.equal(decoded(model, key, dtype), expected.to(dtype))
    monkeypatch.setattr(threads, "compiled", lambda: None)
    assert torch.equal(decoded(model, key), expected)


@pytest.mark.parametrize(
    "name",
    [
        "gptq v2 with biases",
        "gptq in act-order",
        "gptq with its head",
        "awq",
        "fp8 blocks",
        "fbgemm",
        "nf4",
        "int8",
        "gptq of experts",
        "fp8 of experts",
    ],
)
def test_the_tokens_are_those_of_transformers_with_the_same_values(checkpoint, name):
    tiny = checkpoint(name).tiny
    prompts = tiny.clear_cut_prompts([9, 4], 6)
    expected = [t.tokens for t in tiny.references(prompts, 6)]
    for percent in (RAM, DISK, MIXED):
        assert generate(tiny.folder, prompts, percent=percent) == expected


@pytest.mark.parametrize("name", ["gptq", "fp8 blocks", "nf4", "int8"])
def test_int8_matmuls_come_close_wherever_the_weights_are(checkpoint, name):
    folder = checkpoint(name).tiny.folder
    text = checkpoint(name).tiny.prompts([12])
    found = []
    for compute, percent in (("exact", DISK), ("int8", DISK), ("int8", MIXED)):
        with LLM(str(folder), Policy(percent=percent), compute=compute, dtype="float32", progress=False) as llm:
            found.append(torch.tensor(llm.score(text)[0].token_logprobs))
    assert torch.equal(found[1], found[2])
    assert 0 < (found[0] - found[1]).abs().mean() < 0.5


@pytest.mark.parametrize("name", ["gptq", "gptq of one group", "awq", "pack-quantized"])
def test_codes_of_4_bits_are_multiplied_as_stored(checkpoint, name):
    if not takes_blocks():
        pytest.skip("this CPU lacks the instructions")
    matrix = quantised(load(checkpoint(name).tiny.folder), f"{GATE}.weight")
    x = torch.randn(5, matrix.shape[1], generator=torch.Generator().manual_seed(0)).sign()  # exact in 8 bits
    expected = x.double() @ in_blocks(matrix).t()
    assert torch.allclose(int8_linear(x, matrix).double(), expected, rtol=1e-5, atol=1e-5)


def test_fp8_decodes_as_in_transformers(checkpoint):
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    model = load(checkpoint("fp8 blocks").tiny.folder)
    state = load_file(checkpoint("fp8 blocks").tiny.folder / "model.safetensors")
    for name in checkpoint("fp8 blocks").matrices:
        expected = _dequantize_fp8_weight(state[name], state[f"{name}_scale_inv"], [16, 64], torch.float32)
        assert torch.equal(decoded(model, name), expected)


def test_mxfp4_decodes_as_in_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    (experts, out, width) = 3, 8, 96
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, out, width // 32, 16), generator=random).to(torch.uint8)
    scales = torch.randint(100, 140, blocks.shape[:-1], generator=random).to(torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    raw = ggml_blocks(blocks, scales)
    assert torch.equal(GGUF["MXFP4"].view(raw, (experts * out, width)).to(torch.float32), expected.flatten(0, 1))
    scales[1, 2, 0] = 255
    with pytest.raises(ValueError, match="NaN"):
        ggml_blocks(blocks, scales)


# floats beside codes


def test_matrices_that_stayed_floats_are_read_in_place(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("fp8 blocks").tiny.folder, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    del state[f"{GATE}.weight_scale_inv"]
    state[f"{GATE}.weight"] = kept = torch.randn(96, 64).bfloat16()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=tools.BLOCKS | {"modules_to_not_convert": ["lm_head", GATE]})
    model = load(folder)
    assert model.formats[f"{GATE}.weight"] == Dense(torch.bfloat16)
    assert torch.equal(decoded(model, f"{GATE}.weight"), kept.float())
    assert f"{GATE}.weight" not in find(str(folder)).formats(None)[0]


def test_codes_floats_of_the_copy_and_floats_of_the_file_go_together(broken, checkpoint, tmp_path):
    """Each matrix has a format of its own, also under what is made of all of them."""
    folder = broken("gptq in bfloat16", scales=lambda x: x * 2**-20)  # too small for fp16
    state = load_file(folder / "model.safetensors")
    up = GATE.replace("gate", "up")
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        del state[f"{up}.{suffix}"]
    exact = checkpoint("gptq in bfloat16").matrices
    state[f"{up}.weight"] = exact[f"{up}.weight"].clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=GPTQ | {"dynamic": {f"-:{up}": {}}})
    assert f"{up}.weight" not in find(str(folder)).formats(None)[0]
    exact = exact | {f"{GATE}.weight": exact[f"{GATE}.weight"] * 2**-20}
    model = load(folder)
    names = {name: model.formats[name].name for name in exact}
    assert names == dict.fromkeys(exact, "gptq") | {f"{GATE}.weight": "bfloat16", f"{up}.weight": "float32"}
    assert all(torch.allclose(decoded(model, name), exact[name], rtol=0.01, atol=0) for name in exact)
    assert main(["convert", str(folder), "--to", "int8", "-o", str(tmp_path / "out")]) == 0
    for found in (load(folder, compress_weight="int8"), load(tmp_path / "out")):
        assert {found.formats[name] for name in exact} == {Int8()}
        for name, values in exact.items():
            assert (decoded(found, name) - values).abs().max() < 0.01 * values.abs().max()


def test_experts_in_fewer_bits_are_made_of_the_quantised_ones(checkpoint, tmp_path):
    made = checkpoint("fp8 of experts")
    folder = made.tiny.folder
    assert main(["convert", str(folder), "--to", "int8", "-o", str(tmp_path / "out")]) == 0
    for model in (load(folder, compress_weight="int8"), load(tmp_path / "out")):
        for name, values in made.matrices.items():
            assert model.formats[name] == Int8()
            assert (decoded(model, name) - values).abs().max() < 0.01 * values.abs().max()
        assert model.formats["model.layers.0.mlp.gate.weight"].is_dense


def test_an_expert_in_floats_makes_its_group_floats(checkpoint, tmp_path):
    """One whose scales fp16 cannot hold, as they are."""
    folder = shutil.copytree(checkpoint("gptq of experts").tiny.folder, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    module = "model.layers.1.mlp.experts.{}.up_proj"
    state = {name: x.bfloat16() if name.endswith("scales") else x for name, x in state.items()}
    state[f"{module.format(3)}.scales"] *= 2**-20
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    name = f"{module.format('0:5')}.weight"
    dense = {name for name, form in model.formats.items() if form.is_dense and "_proj" in name}
    assert dense == {name}
    expected = checkpoint("gptq of experts").matrices[name].clone()
    expected[3 * 32 : 4 * 32] *= 2**-20
    torch.testing.assert_close(decoded(model, name), expected, rtol=0.01, atol=1e-12)


@pytest.mark.parametrize(
    "tensor, message",
    [
        ("experts.3.up_proj.qweight", "has no tensor 'model.layers.1.mlp.experts.3.up_proj.qweight', though"),
        ("experts.3.up_proj.scales", "has no tensor 'model.layers.1.mlp.experts.3.up_proj.scales', though"),
    ],
)
def test_a_missing_tensor_of_an_expert_is_named(checkpoint, tmp_path, tensor, message):
    folder = shutil.copytree(checkpoint("gptq of experts").tiny.folder, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    del state[f"model.layers.1.mlp.{tensor}"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert message in refusal(folder)


def test_act_order_is_warned_of_once(checkpoint, caplog):
    with caplog.at_level(logging.WARNING):
        load(checkpoint("gptq in act-order").tiny.folder)
    (warning,) = [record.message for record in caplog.records]
    assert "14 of 14 matrices are read in float16" in warning


def test_scales_that_fp16_cannot_hold_keep_a_matrix_in_floats(broken, checkpoint):
    folder = broken("gptq in bfloat16", scales=lambda x: x * 1e-7)
    model = load(folder)
    assert model.formats[f"{GATE}.weight"] == Dense(torch.bfloat16)
    assert sum(form.is_dense for form in model.formats.values()) == 3
    expected = checkpoint("gptq in bfloat16").matrices[f"{GATE}.weight"]
    torch.testing.assert_close(decoded(model, f"{GATE}.weight") * 1e7, expected, rtol=0.01, atol=0.01)


# the copy


def test_the_copy_is_made_once_and_again_for_another_config(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gptq").tiny.folder, tmp_path / "model")
    home = tmp_path / "home" / "converted"
    load(folder)
    made = sorted(os.listdir(home))
    load(folder)
    assert sorted(os.listdir(home)) == made
    change_config(folder, quantization_config=tools.V2)
    changed = decoded(load(folder), f"{GATE}.weight")
    assert sorted(os.listdir(home)) != made
    assert not torch.equal(changed, checkpoint("gptq").matrices[f"{GATE}.weight"])


def test_the_copy_in_fewer_bits_is_made_again_for_another_config(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gptq").tiny.folder, tmp_path / "model")
    before = decoded(load(folder, compress_weight="int8"), f"{GATE}.weight")
    change_config(folder, quantization_config=tools.V2)  # whose zeros are others
    assert not torch.equal(decoded(load(folder, compress_weight="int8"), f"{GATE}.weight"), before)


@pytest.mark.parametrize("name", CASES)
def test_plan_counts_the_bytes_of_the_job(checkpoint, name, capfd):
    folder = checkpoint(name).tiny.folder
    model = load(folder)
    formats, copied = find(str(folder)).formats(None)
    assert copied == model.source.copy_bytes
    assert formats == {key: form for key, form in model.formats.items() if key in formats}
    assert len(formats) == len(checkpoint(name).matrices)
    stored, planned = find(str(folder)).stored("float32"), []
    for known in (formats, model.formats):
        data = ModelData.of(model.spec, "float32", stored, cuda=False, formats=known)
        planned.append(sum(map(data.stored_bytes, data.forms)))
    assert planned[0] == planned[1]
    assert main(["plan", "--model", str(folder), "--prompt-len", "8", "--gen-len", "4", "--json"]) == 0
    sizes = json.loads(capfd.readouterr().out)["model"]
    assert sizes["stored_dtype"] == CASES[name].config["quant_method"]
    assert sizes["weight_bytes"] <= planned[0]  # where vectors may be in 16 bits


def test_weights_in_fewer_bits_are_made_of_the_quantised_ones(checkpoint):
    folder = checkpoint("fp8 blocks").tiny.folder
    model = load(folder, compress_weight="int4")
    assert model.source.copy_bytes == find(str(folder)).formats("int4")[1]
    exact = checkpoint("fp8 blocks").matrices[f"{GATE}.weight"]
    assert (decoded(model, f"{GATE}.weight") - exact).abs().max() < 0.3


def test_no_copy_exceeds_the_disk_limit(checkpoint):
    assert "the quantised weights take" in refusal(checkpoint("gptq").tiny.folder, disk_mem=1000)


# refusals


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "hqq"}, "by the method 'hqq', which is not supported; known methods: gptq, awq, fp8"),
        ({"quant_method": ["gptq"]}, "by the method ['gptq'], which is not supported"),
        ("gptq", "the checkpoint is quantised, but quantization_config is 'gptq'"),
        (GPTQ | {"bits": 3}, "of gptq: 3 bits are not supported, only 4"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; known: gptq, gptq_v2"),
        (GPTQ | {"checkpoint_format": ["gptq"]}, "checkpoint_format ['gptq'] is not supported; known: gptq, gptq_v2"),
        (GPTQ | {"group_size": 48}, "groups of 48 inputs and words of 8 codes do not divide the 64 x 64 of"),
        (GPTQ | {"group_size": 0}, "group_size must be a whole number from 1"),
        (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "gives '+:.*down_proj' other bits or groups"),
        (GPTQ | {"dynamic": ["-:lm_head"]}, "dynamic must give settings of modules, not ['-:lm_head']"),
        (GPTQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of texts"),
        (GPTQ | {"modules_to_not_convert": ["("]}, "a pattern of modules is invalid"),
        (tools.AWQ | {"version": "gemv"}, "version 'gemv' is not supported, only gemm"),
        (tools.AWQ | {"zero_point": False}, "zero_point false is not supported"),
        (tools.BLOCKS | {"weight_block_size": [128]}, "blocks of [128] are not rows and columns"),
        (tools.NF4_CONFIG | {"bnb_4bit_quant_type": "nf3"}, "nf3 in uint8 is not supported; known: nf4, fp4 in uint8"),
        (PACKED | {"format": "marlin-24"}, "format 'marlin-24' of 'int' is not supported; known: float-quantized"),
        (tools.compressed_tensors("pack-quantized", ("re:(",), **tools.BY_GROUP), "a pattern of modules is invalid"),
        (PACKED | {"config_groups": {}}, "config_groups must have the same weights in all groups"),
        ({"quant_method": "awq"}, "of awq: None bits are not supported, only 4"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(checkpoint, tmp_path, config, message):
    folder = shutil.copytree(checkpoint("gptq").tiny.folder, tmp_path / "model")
    change_config(folder, quantization_config=config)
    assert message in refusal(folder)


def test_mlx_and_all_known_methods_are_named(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gptq").tiny.folder, tmp_path / "model")
    change_config(folder, quantization={"bits": 4}, quantization_config=None)
    says = refusal(folder)
    assert "quantised by MLX" in says and all(method in says for method in METHODS)


def test_a_config_of_another_method_is_an_error(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("nf4").tiny.folder, tmp_path / "model")
    change_config(folder, quantization_config=GPTQ)
    assert "has no tensor" in refusal(folder) or "no matrix with '.qweight'" in refusal(folder)


@pytest.mark.parametrize("name", ["gptq", "fp8 blocks"])
def test_a_checkpoint_in_floats_with_a_config_of_codes(checkpoint, tmp_path, name):
    folder = shutil.copytree(checkpoint(name).tiny.folder, tmp_path / "model")
    floats = checkpoint(name).tiny.folder.with_name(f"{name} dequantised")
    shutil.copy(floats / "model.safetensors", folder)
    says = refusal(folder)
    assert "has only floats, though its quantization_config says" in says
    assert says.endswith("delete quantization_config from its config.json")


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("gptq", {"qweight": None}, f"has no tensor '{GATE}.qweight', though its quantization_config says gptq"),
        ("gptq", {"qweight": lambda x: x.half()}, f"has '{GATE}.qweight' in float16 instead of codes, though"),
        ("gptq", {"scales": None}, f"has no tensor '{GATE}.scales', though its quantization_config says gptq"),
        ("gptq", {"qweight": lambda x: x[:-1]}, "qweight' in shape [7, 96], the config asks for [8, 96]"),
        ("gptq", {"g_idx": lambda x: x[:-1]}, "g_idx' in shape [63], the config asks for [64]"),
        ("gptq", {"g_idx": lambda x: x + 1}, "its inputs are in groups 1 to 2, and there are 2"),
        ("gptq", {"g_idx": lambda x: x - 1}, "its inputs are in groups -1 to 0, and there are 2"),
        ("gptq", {"g_idx": lambda x: x * 0}, "its groups have 0 to 64 inputs, not 32 each"),
        ("gptq in act-order", {"g_idx": lambda x: x.where(x.cumsum(0) != 1, x * 0)}, "31 to 33 inputs, not 32 each"),
        ("gptq", {"scales": lambda x: x * float("inf")}, "have NaN or infinite scales"),
        ("awq", {"scales": lambda x: x * float("nan")}, "have NaN or infinite scales"),
        ("awq", {"scales": lambda x: x.int()}, "the scales are in torch.int32, not floats"),
        ("awq", {"qzeros": lambda x: x.long()}, "the codes are in torch.int64, not packed"),
        ("fp8 blocks", {"weight_scale_inv": lambda x: x * float("nan")}, "have NaN or infinite scales"),
        ("fp8 blocks", {"weight_scale_inv": lambda x: x[:1]}, "in shape [1, 1], the config asks for [6, 1]"),
        ("fp8 blocks", {"weight": lambda x: x.view(torch.int8)}, "torch.int8 with scales in torch.bfloat16"),
        ("fp8 tensor", {"weight_scale": lambda x: x.expand(2).clone()}, "2 scales are neither one nor 96"),
        (
            "fp8 tensor",
            {"weight": lambda x: torch.full_like(x.view(torch.uint8), 127).view(x.dtype)},
            "it contains NaN",
        ),
        ("nf4", {"weight.quant_map": lambda x: x.flip(0)}, "its quant_state is not that of a matrix [96, 64] in nf4"),
        ("nf4", {"weight.absmax": lambda x: x[:-1]}, "95 scales do not fit groups of 64 elements"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": lambda x: x[:9]}, "cannot be read as bitsandbytes"),
        ("nf4 nested", {"weight.nested_absmax": lambda x: x[:0]}, "do not fit the 0 of their groups"),
        ("int8", {"weight": lambda x: x.fill_(-128)}, "its codes are not rows in int8 from -127 to 127"),
        ("int8", {"SCB": lambda x: x * float("inf")}, "have NaN or infinite scales"),
        ("int8", {"SCB": None}, f"has no tensor '{GATE}.SCB', though its quantization_config says bitsandbytes"),
    ],
)
def test_broken_tensors_are_named(broken, tmp_path, name, changes, message):
    says = refusal(broken(name, **changes))
    assert message in says and GATE in says
    assert not [*(tmp_path / "home").glob("converted/*/")]
