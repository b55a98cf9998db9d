"""Mixtures of experts: the same tokens wherever experts are and however they are grouped, and only those read that some
token goes through."""

from __future__ import annotations

import json
import shutil

import gguf
import pytest
import torch
import zoo
from gguf import GGMLQuantizationType as Type
from gguf_tools import apart, write_gguf
from safetensors.torch import load_file, save_file

from h2o_flexgen import LLM, Policy, SamplingParams, UserError
from h2o_flexgen.formats import Dense, Int4
from h2o_flexgen.formats.forms import Form, names_of
from h2o_flexgen.kernels.attention import causal_attention
from h2o_flexgen.kernels.experts import Routing
from h2o_flexgen.kernels.linear import linear
from h2o_flexgen.models import spec as spec_module
from h2o_flexgen.models.gguf import GGUFFile
from h2o_flexgen.models.registry import family, read_spec
from h2o_flexgen.profiling import calibration
from h2o_flexgen.profiling.layer_model import LayerModel
from h2o_flexgen.storage.staging import StagedExperts, expert_bytes

LENGTHS = [5, 17, 9, 2]
BUDGET = (4, 4)
OPTIONS = dict(device="cpu", dtype="float32", progress=False)
ON_DISK = dict(percent=(0, 0, 0, 0, 0, 0))
SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
GEMMA4 = "gemma4_text_experts_and_values_that_are_keys"
#: (name, changes to its config, architecture of its GGUF files)
MODELS = {
    "qwen3_moe": (SIZES | {"moe_intermediate_size": 32}, "qwen3moe"),
    "qwen2_moe": (SIZES | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}, "qwen2moe"),
    GEMMA4: (SIZES | {"moe_intermediate_size": 32, "global_head_dim": 32}, "gemma4"),
    "mixtral": (SIZES, "llama"),
    "gpt_oss": (SIZES, "gpt-oss"),
}
#: experts alone, beside one that all tokens go through, and beside an MLP
NAMES = ["qwen3_moe", "qwen2_moe", GEMMA4]


@pytest.fixture(params=[1, 3000], ids=["one by one", "a few"])
def groups(request, monkeypatch):
    """Layers whose experts are in several groups."""
    monkeypatch.setattr(spec_module, "GROUP_ELEMENTS", request.param)


@pytest.mark.parametrize("budget", [None, BUDGET], ids=["full", "h2o"])
@pytest.mark.parametrize(
    "policy",
    [
        dict(percent=(100, 0, 100, 0, 100, 0), gpu_batch_size=3, num_gpu_batches=2),
        dict(percent=(50, 0, 50, 0, 0, 50), gpu_batch_size=4, prefill_tokens=12),
        dict(**ON_DISK, gpu_batch_size=2, num_gpu_batches=2, prefill_tokens=8),
        dict(**ON_DISK, gpu_batch_size=1, overlap=False),
    ],
    ids=["ram", "half", "disk", "disk, few tokens"],
)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_do_not_depend_on_where_experts_are(tiny, run, groups, name, policy, budget):
    model = tiny(name)
    assert len(family(zoo.FAMILY[name]).tensors(read_spec(model.folder))[1].units) > 2
    prompts = model.clear_cut_prompts(LENGTHS, 8, [(None, None), BUDGET])
    outputs = run(model, prompts, 8, budget, **policy)
    assert [o.token_ids for o in outputs] == [t.tokens for t in model.references(prompts, 8, *(budget or ()))]


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_enter_beside_others(tiny, run, name):
    """Prompts and decode steps of a pass share the experts' matmuls."""
    model = tiny(name)
    prompts = model.clear_cut_prompts([5, 17, 9, 2, 7, 12], 8, [(None, None)])
    lengths = [8, 2, 5, 8, 1, 6]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    with LLM(str(model.folder), Policy(2, **ON_DISK), **OPTIONS) as llm:
        outputs = [row.outputs[0].token_ids for row in llm.generate(prompts, params)]
    assert outputs == [trace.tokens[:n] for trace, n in zip(model.references(prompts, 8), lengths)]


def read_bytes(model, prompts, monkeypatch, share, on_disk=True):
    """Bytes of weights that decode steps read, from disk or from another place in RAM."""
    monkeypatch.setattr("h2o_flexgen.planning.workload.ALL_EXPERTS", share)
    percent = (0, 0 if on_disk else 100, 100, 0, 100, 0)
    policy = Policy(len(prompts), percent=percent, overlap=False)  # so that prefill reads nothing for a step
    with LLM(str(model.folder), policy, **OPTIONS) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True))
        return llm.report["decode"]["bytes_moved"]["disk_to_cpu" if on_disk else "cpu_to_gpu"]


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_are_read_when_they_are_needed(tiny, name):
    """As calibrations do with models larger than RAM: a layer several times in a row."""
    found = []
    for streams in (False, True):
        with LLM(str(tiny(name).folder), **OPTIONS) as llm:
            model = LayerModel(llm.model, progress=False, streams=streams)
            ids = torch.tensor(tiny(name).prompts([7, 7]))
            positions = torch.arange(7).expand(2, 7)
            with torch.inference_mode():
                hidden = model.embed(ids, positions)
                found += [model.block(0, hidden.clone(), positions, causal_attention) for _ in range(2)]
            if streams:
                model.close()
    assert all(torch.equal(each, found[0]) for each in found)


def test_sinks_outlast_the_experts_that_are_read_behind_them(tiny):
    """The heads of a streamed layer are measured when its experts have been read."""
    found = []
    for streams in (False, True):
        with LLM(str(tiny("gpt_oss").folder), **OPTIONS) as llm:
            model = LayerModel(llm.model, progress=False, streams=streams)
            ids = torch.tensor(tiny("gpt_oss").prompts([96, 96]))
            found.append(calibration.measure(model, ids, "h2o", progress=False))
            if streams:
                model.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("on_disk", [True, False], ids=["disk", "RAM"])
def test_experts_without_a_token_are_not_read(tmp_path, monkeypatch, on_disk):
    changes = dict(num_experts=16, num_experts_per_tok=1, num_hidden_layers=2, moe_intermediate_size=512)
    model = zoo.build("qwen3_moe", tmp_path, **changes)
    (few,) = ([prompt] for prompt in model.prompts([5]))
    all_of_them = read_bytes(model, few, monkeypatch, 0.0, on_disk)
    wanted = read_bytes(model, few, monkeypatch, 0.9, on_disk)
    assert wanted < all_of_them / 4
    many = model.prompts([5] * 40)
    assert read_bytes(model, many, monkeypatch, 0.9, on_disk) == read_bytes(model, many, monkeypatch, 0.0, on_disk)


def test_experts_without_a_token_are_not_decoded():
    """Where they stay in RAM as stored, and matmuls read floats."""
    stored = Int4(32)
    floats = torch.randn(4 * 8, 64, generator=torch.Generator().manual_seed(0))
    matrix = stored.view(torch.empty(stored.nbytes(floats.shape), dtype=torch.uint8), floats.shape)
    stored.encode(floats, matrix.raw)
    form = Form(stored, stored, Dense(torch.float32))
    each = expert_bytes("gpu", form, (8, 64), cuda=False)
    experts = StagedExperts(matrix, floats.shape, form, each, 4)
    buffer = torch.full((experts.size.converted,), 255, dtype=torch.uint8)
    experts.choose({2})
    none, _, decoded, _ = experts.operand(buffer)
    assert none is None
    assert torch.equal(decoded, matrix.to(torch.float32)[16:24])
    assert (buffer == 255).sum() >= 3 * each.converted
    experts.choose(None)
    assert torch.equal(torch.cat(experts.operand(buffer)), matrix.to(torch.float32))


@pytest.mark.parametrize(
    "name, kind",
    [
        ("qwen3_moe", Type.Q8_0),
        ("qwen3_moe", Type.Q4_0),
        ("qwen3_moe", Type.F16),
        ("qwen2_moe", Type.Q8_0),
        ("qwen2_moe", Type.F16),
        (GEMMA4, Type.Q8_0),
        (GEMMA4, Type.Q4_0),
        ("mixtral", Type.Q8_0),
        ("gpt_oss", Type.MXFP4),
    ],
)
def test_a_gguf_file(tmp_path, name, kind):
    """Experts in stacks, which are read in place where they are quantised."""
    changes, arch = MODELS[name]
    model = zoo.build(name, tmp_path / "checkpoint", **changes)
    state = apart(load_file(model.folder / "model.safetensors"))
    state = {key: tensor.contiguous() for key, tensor in state.items()}
    for key, tensor in state.items():
        if tensor.dim() > 1 and not key.endswith(("gate.weight", "router.weight", "router.proj.weight")):
            state[key] = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)).view(tensor.shape)
    save_file(state, model.folder / "model.safetensors", metadata={"format": "pt"})
    others = {".gate": Type.F32, ".router": Type.F32, ".router.proj": Type.F32}
    path = write_gguf(tmp_path / "model.gguf", model, kind, arch, others=others)
    prompts = model.prompts(LENGTHS)
    found = []
    for source, policy in ((model.folder, Policy(4)), (path, Policy(4)), (path, Policy(2, 2, **ON_DISK))):
        with LLM(str(source), policy, **OPTIONS) as llm:
            rows = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
            found.append([row.outputs[0].token_ids for row in rows])
            if kind != Type.F16 and source == path:
                stored = [llm.model.source.find(name) for name in llm.model.formats if "experts" in name]
                assert {tensor.file.path for tensor in stored} == {path}
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("compress", ["int8", "int4"])
@pytest.mark.parametrize("compute", ["exact", "int8"])
@pytest.mark.parametrize("name, gate", [*zip(NAMES, ("mlp.gate", "mlp.shared_expert_gate", "router.proj"))])
def test_fewer_bits(tmp_path, name, gate, compress, compute):
    """Routers stay as they are; experts on disk give the tokens of experts in RAM."""
    model = zoo.build(name, tmp_path / "model", **MODELS[name][0])
    prompts = model.prompts(LENGTHS)
    found = []
    for policy in (Policy(4), Policy(2, 2, **ON_DISK)):
        with LLM(str(model.folder), policy, compress_weight=compress, compute=compute, **OPTIONS) as llm:
            rows = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True))
            found.append([row.outputs[0].token_ids for row in rows])
            assert llm.model.formats[f"model.layers.0.{gate}.weight"].is_dense
    assert found[0] == found[1]


def test_a_routing_adds_up_experts_in_their_order():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [1, 3], [0, 1]])
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(1))
    routing = Routing(ids, weights)
    total = torch.zeros_like(x)
    multiply = lambda w, rows: linear(rows, w["matrix"])
    for group in (range(2), range(2, 4)):
        routing.add(group, {"matrix": [torch.eye(4) * (n + 1) for n in group]}, multiply, x, total)
    assert set(routing.experts) == {0, 1, 3}
    for token in range(6):
        expected = sum(float(w) * (int(e) + 1) * x[token] for e, w in zip(ids[token], weights[token]))
        torch.testing.assert_close(total[token], expected)


# bad input


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy of a checkpoint to break."""
    return shutil.copytree(tiny("qwen3_moe").folder, tmp_path / "broken")


def refusal(folder) -> str:
    with pytest.raises(UserError) as e:
        LLM(str(folder), **OPTIONS)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_a_missing_expert_is_named(folder):
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert "no tensor 'model.layers.1.mlp.experts.3.up_proj.weight'" in refusal(folder)


def test_an_expert_of_another_shape_is_named(folder):
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.experts.3.up_proj.weight"] = torch.zeros(3, 3)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert "'model.layers.1.mlp.experts.3.up_proj.weight' in shape [3, 3]" in refusal(folder)


def test_an_expert_of_another_type_is_named(folder):
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file(state | {name: state[name].half()}, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"{name!r} in float16, other experts in float32" in refusal(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_experts_per_tok=6), "num_experts_per_tok is 6, but there are only 5 experts"),
        (dict(num_experts=-1), "num_experts must be a whole number from 0"),
        (dict(num_experts=7), "gate.weight' in shape [5, 24], the config asks for [7, 24]"),
        (dict(moe_intermediate_size=13), "the config asks for [13, 24]"),
    ],
)
def test_a_config_that_contradicts_the_experts(folder, changes, message):
    config = json.loads((folder / "config.json").read_text())
    if "num_experts" in changes:
        config.pop("num_local_experts", None)
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert message in refusal(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(shared_expert_intermediate_size=0), "shared_expert_intermediate_size must be a whole number from 1"),
        (dict(shared_expert_intermediate_size=21), "shared_expert.gate_proj.weight' in shape [20, 24]"),
        (dict(qkv_bias="yes"), "qkv_bias must be true or false"),
        (dict(use_sliding_window=True, sliding_window=0), "sliding_window must be a whole number from 1"),
        (dict(decoder_sparse_step=0), "decoder_sparse_step must be a whole number from 1"),
    ],
)
def test_a_config_that_contradicts_the_shared_expert(tiny, tmp_path, changes, message):
    folder = shutil.copytree(tiny("qwen2_moe").folder, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert message in refusal(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_experts=7), "experts.down_proj' in shape [5, 24, 12], the config asks for 7 experts"),
        (dict(num_experts=4), "experts.down_proj' in shape [5, 24, 12], the config asks for 4 experts"),
        (dict(enable_moe_block=False), "experts.down_proj' in shape [5, 24, 12], the config asks for 0 experts"),
        (dict(num_experts=None), "num_experts must be a whole number from 1"),
        (dict(top_k_experts=6), "top_k_experts is 6, but there are only 5 experts"),
        (dict(top_k_experts=None), "top_k_experts must be a whole number from 1"),
        (dict(moe_intermediate_size=13), "experts.gate_up_proj' in shape [120, 24], the config asks for [130, 24]"),
    ],
)
def test_a_config_that_contradicts_experts_in_one_tensor(tiny, tmp_path, changes, message):
    folder = shutil.copytree(tiny(GEMMA4).folder, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert message in refusal(folder)


@pytest.mark.parametrize("shape", [(4, 24, 24), (6, 24, 24), (120, 24)])
def test_experts_in_one_tensor_of_another_shape_are_refused(tiny, tmp_path, shape):
    folder = shutil.copytree(tiny(GEMMA4).folder, tmp_path / "broken")
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.experts.gate_up_proj"] = torch.zeros(shape)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"'model.layers.1.experts.gate_up_proj' in shape {list(shape)}" in refusal(folder)


def test_metadata_of_a_gguf_file_that_contradict_its_experts(tiny, tmp_path):
    model = tiny("qwen3_moe")
    path = write_gguf(tmp_path / "model.gguf", model, arch="qwen3moe", qwen3moe__expert_count=4)
    says = refusal(path)
    assert "ffn_gate_inp.weight' has the shape [5, 24], its metadata ask for [4, 24]" in says


def test_old_files_lack_widths_of_experts(tiny, tmp_path):
    """llama.cpp's defaults stand for them."""
    path = write_gguf(tmp_path / "model.gguf", tiny("qwen2_moe"), arch="qwen2moe")
    for key in (b"qwen2moe.expert_feed_forward_length", b"qwen2moe.expert_shared_feed_forward_length"):
        path.write_bytes(path.read_bytes().replace(key, b"x" * len(key)))
    found = GGUFFile(path).config
    assert (found["moe_intermediate_size"], found["shared_expert_intermediate_size"]) == (20, 40)
    assert found["norm_topk_prob"] is False


def test_a_row_whose_router_gives_nan_ends_alone(tmp_path):
    model = zoo.build("qwen3_moe", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.embed_tokens.weight"][7] = 3e38  # its square overflows in the norm
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts = [[3, 5, 9], [3, 7, 9], [1, 2]]
    with LLM(str(tmp_path), Policy(3), **OPTIONS) as llm:
        rows = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    assert rows[1].error is not None
    expected = [model.oracle.generate(prompts[n], 4).tokens for n in (0, 2)]
    assert [rows[n].outputs[0].token_ids for n in (0, 2)] == expected


def test_names_of_a_range():
    assert names_of("a.experts.2:4.up.weight") == ["a.experts.2.up.weight", "a.experts.3.up.weight"]
    assert names_of("a.up.weight") == []
