"""GGUF files: their types, configs, tensors and tokens, compared with the package `gguf`, with transformers, and with
the checkpoint that they were made from."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import zoo
from gguf import GGMLQuantizationType as Type
from gguf_tools import one_tensor, write_gguf
from int8_oracle import in_blocks, multiplying
from machines import kernels, laptop
from safetensors.torch import load_file, save_file

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import GGUF, Int8, Quantised
from h2o_flexgen.kernels import linear, operands
from h2o_flexgen.kernels.operands import Int8Weight
from h2o_flexgen.models.gguf import GGUFFile
from h2o_flexgen.models.llama import LLAMA3_ROPE
from h2o_flexgen.models.registry import family, read_spec, spec_of
from h2o_flexgen.models.rope import frequencies
from h2o_flexgen.models.source import find_model
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.shapes import ModelData
from h2o_flexgen.planning.workload import Workload

pytest_plugins = ["command_tools"]

FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
QUANTISED = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
QUANTISED += [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS]

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3_ROPE}


def tensors(path: Path, dtype=torch.float32) -> dict[str, torch.Tensor]:
    file = GGUFFile(path)
    spec = spec_of(file.config)
    return dict(file.checkpoint_tensors(family(spec.model_type).tensors(spec), dtype))


@pytest.mark.parametrize("kind", [*FLOATS, *QUANTISED], ids=lambda kind: kind.name)
def test_a_tensor_of_each_type(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("h2o_flexgen.models.gguf.PART", 128)  # several parts
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (7, 4 * nbytes), np.uint8)
    raw = raw.view({Type.F32: np.float32, Type.F16: np.float16}.get(kind, np.uint8))
    found = GGUFFile(one_tensor(tmp_path / "x.gguf", raw, kind)).dequantised("x", torch.float32)
    assert found.shape == (7, 4 * elements) and found.dtype == FLOATS.get(kind, torch.float32)
    assert np.array_equal(found.float().numpy(), gguf.dequantize(raw, kind), equal_nan=True)


@pytest.mark.parametrize(
    "name, arch",
    [("llama_biases_llama3", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
    + [("llama_no_groups_tied", "llama"), ("llama_groups_of_3_wide_heads_linear", "llama")],
)
def test_the_tensors_are_those_of_the_checkpoint(tmp_path, name, arch):
    changes = {"rope_parameters": LLAMA3, "max_position_embeddings": 131072} if "llama3" in name else {}
    tiny = zoo.build(name, tmp_path / "checkpoint", **changes)
    found = tensors(write_gguf(tmp_path / "model.gguf", tiny, arch=arch))
    state = load_file(tiny.folder / "model.safetensors")
    assert found and all(torch.equal(tensor, state[key]) for key, tensor in found.items())


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_rope_scaling(tmp_path, scaling):
    tiny = zoo.build("llama", tmp_path / "checkpoint")
    extra = {"llama__rope__scaling__type": scaling, "llama__rope__scaling__factor": 4.0}
    extra |= {"llama__rope__scaling__original_context_length": 16} if scaling == "yarn" else {}
    rope = spec_of(GGUFFile(write_gguf(tmp_path / "model.gguf", tiny, **extra)).config).rope
    assert rope.type == scaling and dict(rope.scaling)["factor"] == 4.0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_scaling_of_llama_3_is_recognised_by_its_frequencies(tmp_path, factor):
    rope = LLAMA3 | {"factor": factor}
    tiny = zoo.build("llama", tmp_path / "checkpoint", rope_parameters=rope, max_position_embeddings=131072)
    found = spec_of(GGUFFile(write_gguf(tmp_path / "model.gguf", tiny)).config)
    assert found.rope == read_spec(tiny.folder).rope


def test_longrope_is_recognised_by_its_two_sets_of_divisors(tmp_path, tiny):
    model = tiny("llama_longrope")
    found = spec_of(GGUFFile(write_gguf(tmp_path / "model.gguf", model)).config).rope
    wanted = read_spec(model.folder).rope
    assert (found.type, found.theta, found.dim) == (wanted.type, wanted.theta, wanted.dim)
    for length in (16, 17):
        each, scale = frequencies(found, length)
        their_each, their_scale = frequencies(wanted, length)
        torch.testing.assert_close(each, their_each)
        assert scale == pytest.approx(their_scale)


def test_rope_divisors_that_are_not_those_of_llama_3(tmp_path):
    rope = LLAMA3 | {"original_max_position_embeddings": 32}
    tiny = zoo.build("llama", tmp_path / "checkpoint", rope_parameters=rope)
    with pytest.raises(UserError, match="not those of LLaMA 3"):
        _ = GGUFFile(write_gguf(tmp_path / "model.gguf", tiny)).config


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"llama__attention__head_count": "four"}, "head_count must be a whole number, 1 or more, not 'four'"),
        ({"llama__attention__head_count": 0}, "head_count must be a whole number"),
        ({"llama__embedding_length": [1, 2]}, "embedding_length must be a whole number"),
        ({"llama__attention__key_length": 64}, "rotates only a part of each head"),
        ({"llama__rope__dimension_count": 2}, "rotates only a part of each head"),
        ({"tokenizer__ggml__eos_token_id": "end"}, "eos_token_id must be a token id"),
        ({"llama__attention__layer_norm_rms_epsilon": "small"}, "rms_norm_eps must be a positive number"),
        ({"llama__attention__layer_norm_rms_epsilon": -1e-5}, "rms_norm_eps must be a positive number, not -"),
        ({"llama__rope__scaling__type": "new"}, "factor"),
        ({"llama__rope__freq_base": float("nan")}, "theta must be a positive number, not nan"),
        ({"llama__attention__head_count_kv": 0}, "num_key_value_heads must be"),
        ({"llama__attention__head_count_kv": 3}, "not divisible by num_key_value_heads 3"),
        ({"llama__context_length": 0}, "max_position_embeddings must be"),
        ({"llama__block_count": 1000000}, "has no tensor 'blk.999999.attn_norm.weight', though its block_count is"),
        ({"llama__feed_forward_length": [96] * 1000}, r"must be .*, not \[96, 96, 96, 96, 96, 96, ...\]"),
        ({"llama__expert_count": 8}, "no value for llama.expert_used_count"),
    ],
)
def test_invalid_metadata(tmp_path, tiny, metadata, message):
    path = write_gguf(tmp_path / "model.gguf", tiny("llama"), **metadata)
    with pytest.raises(UserError, match=message) as error:
        find_model(str(path))
    assert str(path) in str(error.value)


def test_a_tensor_of_another_shape(tmp_path, refused):
    tiny = zoo.build("llama", tmp_path / "checkpoint")
    state = load_file(tiny.folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(state | {name: state[name].repeat(2, 1)}, tiny.folder / "model.safetensors")
    path = write_gguf(tmp_path / "model.gguf", tiny)
    assert "'blk.0.attn_q.weight' has the shape [48, 24], its metadata ask for [24, 24]" in refused(
        "--model", path, early=False
    )


def test_a_folder_whose_name_ends_in_gguf(tmp_path):
    folder = zoo.build("llama", tmp_path / "model.gguf").folder
    assert find_model(str(folder)) == (folder, folder)


def test_bad_files(tmp_path, refused):
    path = write_gguf(tmp_path / "whole.gguf", zoo.build("llama", tmp_path / "checkpoint"))
    data = path.read_bytes()
    for content in (b"", b"PK\x03\x04" + bytes(5000), data[:100], data[:-3000]):
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a whole GGUF file"):
            GGUFFile(path)
    assert "did you mean whole.gguf?" in refused("--model", tmp_path / "hole.gguf")
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="architecture 'mamba'; known: llama, qwen2, qwen3"):
        GGUFFile(tmp_path / "mamba.gguf")


ON_DISK = {"percent": (0, 0, 0, 0, 0, 0)}
IN_RAM = {"percent": (100, 0, 100, 0, 100, 0)}


SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
WIDE = SIZES | dict(hidden_size=256, intermediate_size=512, num_attention_heads=16)
#: mixed as llama.cpp does it: {end of a module's name: type}, the first one of all others
MIXED = {
    "Q4_K_M": (Type.Q4_K, {"v_proj": Type.Q6_K, "down_proj": Type.Q6_K, "embed_tokens": Type.Q6_K}),
    "Q5_K_M": (Type.Q5_K, {"k_proj": Type.Q8_0, "down_proj": Type.Q5_1, "gate_proj": Type.MXFP4}),
    "Q3_K": (Type.Q3_K, {"q_proj": Type.Q2_K, "up_proj": Type.IQ4_XS, "v_proj": Type.IQ4_NL, "o_proj": Type.Q5_0}),
}


def quantised_llama(folder: Path, kind: Type, others: dict | None = None, **changes) -> zoo.Tiny:
    """A random llama in a GGUF file, as transformers reads it."""
    from transformers import AutoModelForCausalLM

    sizes = WIDE if gguf.GGML_QUANT_SIZES[kind][0] > 32 else SIZES
    tiny = zoo.build("llama", folder / "checkpoint", **sizes | changes)
    path = write_gguf(folder / "model.gguf", tiny, kind, others=others)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32).eval()
    return zoo.Tiny("llama", model, path)


@pytest.fixture(scope="module", params=[Type.Q8_0, Type.Q4_0, Type.Q4_1], ids=lambda kind: kind.name)
def quantised(request, tmp_path_factory) -> zoo.Tiny:
    """Its type is read in place."""
    return quantised_llama(tmp_path_factory.mktemp("quantised"), request.param)


@pytest.fixture(scope="module")
def to_convert(tmp_path_factory) -> zoo.Tiny:
    """Its type is converted."""
    return quantised_llama(tmp_path_factory.mktemp("to_convert"), Type.TQ2_0)


@pytest.fixture(scope="module", params=MIXED)
def mixed(request, tmp_path_factory) -> zoo.Tiny:
    """A file with several types, and a head tied to the embedding."""
    kind, others = MIXED[request.param]
    folder = tmp_path_factory.mktemp("mixed")
    return quantised_llama(folder, kind, others, tie_word_embeddings=True)


@pytest.mark.parametrize("where, budget", [(IN_RAM, (3, 3)), (ON_DISK, (None, None))], ids=["in_ram", "on_disk"])
def test_a_quantised_llama_gives_the_tokens_of_transformers(quantised, run, where, budget):
    prompts = quantised.clear_cut_prompts([9, 4, 12], 8, ((None, None), (3, 3)))
    outputs = run(quantised, prompts, 8, budget if budget[0] else None, gpu_batch_size=2, num_gpu_batches=2, **where)
    assert [o.token_ids for o in outputs] == [t.tokens for t in quantised.references(prompts, 8, *budget)]


@pytest.mark.parametrize("blocks, where", [(False, IN_RAM), (True, ON_DISK)], ids=["codes_of_8_bits", "as_stored"])
def test_its_matmuls_in_int8_are_those_of_the_oracle(quantised, monkeypatch, request, where, blocks):
    if blocks:
        if source_type(quantised) == "Q8_0":
            pytest.skip("only for 4 bits")
        request.getfixturevalue("fast_blocks")
    monkeypatch.setattr(operands, "OUTLIER_RATIO", 3.0)  # rows are too short for real outliers
    oracle = multiplying(quantised.oracle, 3.0, operands.MAX_OUTLIERS, rounds=not blocks)
    (text,) = quantised.prompts([12])
    options = dict(device="cpu", dtype="float32", compute="int8", in_blocks=blocks, progress=False)
    with LLM(str(quantised.folder), Policy(**where), **options) as llm:
        if blocks:
            oracle.w = oracle.w | {name: in_blocks(matrix) for name, matrix in matrices(llm.model)}
        trace = oracle.generate(text, 6)
        (found,) = llm.score([text + trace.tokens], len(text))
    assert found.token_logprobs == pytest.approx(trace.logprobs, abs=0.01)


def matrices(model):
    """(name in the oracle, stored matrix) of all linear layers."""
    for name, form in model.formats.items():
        if "embed" not in name:
            stored = model.source.find(name)
            raw = np.fromfile(stored.file.path, np.uint8, stored.nbytes, offset=stored.offset)
            yield name.removeprefix("model."), Quantised(form, torch.from_numpy(raw), stored.shape)


@pytest.mark.parametrize("where, compute", [(IN_RAM, "exact"), (ON_DISK, "exact"), (ON_DISK, "int8")])
def test_a_file_of_several_types(mixed, run, where, compute, tmp_path):
    prompts = mixed.clear_cut_prompts([9, 12], 6)
    with LLM(
        str(mixed.folder), Policy(2, **where), device="cpu", dtype="float32", compute=compute, progress=False
    ) as llm:
        outputs = [row.outputs[0] for row in llm.generate(prompts, SamplingParams(max_tokens=6))]
        stored = {llm.model.source.find(name).file.path for name in llm.model.formats if "norm" not in name}
    assert stored == {mixed.folder}
    wanted = mixed.references(prompts, 6)
    if compute == "exact":
        assert [o.token_ids for o in outputs] == [t.tokens for t in wanted]
    first = [t.logprobs[0] for t in wanted]
    assert [o.logprobs[0] for o in outputs] == pytest.approx(first, abs=1e-4 if compute == "exact" else 0.2)


def test_its_matrices_are_read_in_place(quantised, tmp_path):
    with LLM(str(quantised.folder), device="cpu", dtype="float32", progress=False) as llm:
        source = llm.model.source
        stored = {name: source.find(name) for name in llm.model.formats}
    assert {(s.file.path, s.format.name) for s in stored.values()} == {(quantised.folder, source_type(quantised))}
    (copy,) = (tmp_path / "home" / "converted").glob("*/*.safetensors")
    assert all(tensor.dim() == 1 for tensor in load_file(copy).values())


def test_a_config_of_another_model(quantised, tiny):
    with pytest.raises(UserError, match="has no tensor 'model.decoder.*': the config is of another model"):
        LLM(str(tiny("opt").folder), path=str(quantised.folder), device="cpu", progress=False)


def source_type(tiny: zoo.Tiny) -> str:
    return GGUFFile(tiny.folder).tensors["token_embd.weight"].type


def test_another_type_gives_the_tokens_of_transformers(to_convert, run):
    prompts = to_convert.clear_cut_prompts([9, 4], 8)
    outputs = run(to_convert, prompts, 8, gpu_batch_size=2, **ON_DISK)
    assert [o.token_ids for o in outputs] == [t.tokens for t in to_convert.references(prompts, 8)]


def test_another_type_is_converted_once_for_each_type_of_a_job(to_convert, tmp_path):
    folders = []
    for dtype in ("float32", "bfloat16", "float32"):
        with LLM(str(to_convert.folder), device="cpu", dtype=dtype, progress=False) as llm:
            assert {form.name for form in llm.model.formats.values()} == {dtype}
        folders.append(len(list((tmp_path / "home" / "converted").glob("*/*.safetensors"))))
    assert folders == [1, 2, 2]


def test_a_folder_with_one_or_two_files(quantised, tmp_path, refused):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(quantised.folder, folder / "a.gguf")
    assert find_model(str(folder))[0] == folder / "a.gguf"
    assert find_model(None, str(folder))[0] == folder / "a.gguf"
    assert find_model(str(folder), str(quantised.folder))[0] == quantised.folder
    shutil.copy(quantised.folder, folder / "b.gguf")
    assert "holds several GGUF files, name one: a.gguf, b.gguf" in refused("--model", folder)


def test_a_type_that_cannot_be_read(to_convert, refused, monkeypatch):
    monkeypatch.delitem(gguf.quants._type_traits, Type.TQ2_0)
    message = refused("--model", to_convert.folder, early=False)
    assert "is of the type TQ2_0" in message and "cannot be read" in message


def test_without_the_package(refused, quantised, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install gguf" in refused("--model", quantised.folder)


def is_decoded(choice: ExecutionPlan) -> bool:
    """Whether some matrices are decoded when they are loaded."""
    return any(not form.stored.is_dense and form.kept != form.stored for form in choice.forms.values())


def test_it_is_decoded_on_loading_where_there_is_room(quantised):
    """Then no step decodes blocks or unpacks them to int8; otherwise everything stays in its stored form. The results
    are the same."""
    prompts = quantised.clear_cut_prompts([9, 4], 4)
    found = []
    for policy, compute, decoded in (
        (Policy(), "exact", True),
        ("auto", "exact", True),
        (Policy(percent=(50, 0, 100, 0, 100, 0)), "exact", False),
        (Policy(), "int8", True),
        (Policy(percent=(50, 0, 100, 0, 100, 0)), "int8", False),
    ):
        with LLM(str(quantised.folder), policy, compute=compute, device="cpu", dtype="float32", progress=False) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
            assert is_decoded(llm.choice) == decoded
            held = llm.runner.weights.resident["model.layers.0.mlp.up_proj.weight"] if decoded else None
            assert not isinstance(held, Quantised) or (compute == "int8" and held.format == Int8())
            assert decoded or "model.layers.0.mlp.up_proj.weight" in llm.runner.weights.stored
            scores = [logprob for text in llm.score(prompts, 2) for logprob in text.token_logprobs]
            found.append(([o.outputs[0].token_ids for o in outputs], scores))
    # where weights stream a pass scores several tokens: its matmuls have more rows, which may change the last bits
    same = lambda n, m: found[n][0] == found[m][0] and found[n][1] == pytest.approx(found[m][1], abs=1e-4)
    assert found[0] == found[1] and same(0, 2) and same(3, 4) and not same(0, 3)


def test_blocks_of_4_bits_are_multiplied_in_their_stored_form(tmp_path, fast_blocks):
    """Where that is fast nothing is decoded, not even a tied head."""
    tied = quantised_llama(tmp_path, Type.Q4_0, tie_word_embeddings=True)
    found = []
    for policy in (Policy(), Policy(percent=(50, 0, 100, 0, 100, 0)), "auto"):
        with LLM(str(tied.folder), policy, compute="int8", device="cpu", dtype="float32", progress=False) as llm:
            found.append([text.token_logprobs for text in llm.score([[5, 9, 7], [8, 3, 6, 4]], 1)])
            assert not is_decoded(llm.choice)
            weights = llm.runner.weights.get(1) | llm.runner.weights.get(len(llm.model.layers) - 1)
            assert {w.format.name for w in weights.values() if isinstance(w, Quantised)} == {"Q4_0"}
            assert not any(isinstance(w, Int8Weight) for w in weights.values())
    assert found[0] == found[1] == found[2]


def test_rates_that_change_later_change_nothing(tmp_path, fast_blocks):
    """As when another model in the process brings its own profile."""
    model = quantised_llama(tmp_path, Type.Q4_0)
    for first in (True, False):
        linear.use(kernels(blocks=first))
        for policy in (Policy(), Policy(percent=(50, 0, 100, 0, 100, 0))):
            with LLM(str(model.folder), policy, compute="int8", device="cpu", dtype="float32", progress=False) as llm:
                before = [text.token_logprobs for text in llm.score([[5, 9, 7]], 1)]
                linear.use(kernels(blocks=not first))
                assert [text.token_logprobs for text in llm.score([[5, 9, 7]], 1)] == before
                linear.use(kernels(blocks=first))


def test_a_tied_head_is_decoded_into_a_copy(tmp_path):
    """For int8 matmuls the head is decoded on loading; the embedding stays in blocks."""
    tied = quantised_llama(tmp_path, Type.Q4_0, tie_word_embeddings=True)
    name = "model.embed_tokens.weight"
    found = []
    for policy in (Policy(), Policy(percent=(50, 0, 100, 0, 100, 0))):
        with LLM(str(tied.folder), policy, compute="int8", device="cpu", dtype="float32", progress=False) as llm:
            found.append([text.token_logprobs for text in llm.score([[5, 9, 7], [8, 3, 6, 4]], 1)])
            head = llm.runner.weights.get(len(llm.model.layers) - 1)["head.weight"]
            assert isinstance(head, Int8Weight) == is_decoded(llm.choice) == (policy == Policy())
            embedding = llm.runner.weights.resident.get(name) or llm.runner.weights.stored[name]
            assert embedding.format == GGUF["Q4_0"]
    assert found[0] == found[1]


def test_without_room_for_the_copy_everything_else_is_decoded(tmp_path, monkeypatch):
    tied = quantised_llama(tmp_path, Type.Q8_0, tie_word_embeddings=True)
    options = dict(compute="int8", device="cpu", dtype="float32")
    prompts = [[5, 9, 7], [8, 3, 6, 4]]
    found = []
    with LLM(str(tied.folder), Policy(), **options, progress=False) as llm:
        found.append([text.token_logprobs for text in llm.score(prompts, 1)])
        resources = llm.resources()
        choices = []
        nbytes = None
        while not choices or is_decoded(choices[-1]):
            few = resources.limits | ({} if nbytes is None else {"gpu": nbytes, "ram": nbytes})
            choices.append(llm.planner.choose(Workload((8, 8), 4), replace(resources, limits=few), Policy()))
            nbytes = choices[-1].plan.needed("ram") - 1
    assert ["model.embed_tokens.weight (copy)" in choice.forms for choice in choices] == [True, False, False]
    assert list(map(is_decoded, choices)) == [True, True, False]
    every = ModelData.decoded
    monkeypatch.setattr(ModelData, "decoded", lambda self: every(self)[1:])
    with LLM(str(tied.folder), Policy(), **options, progress=False) as llm:
        found.append([text.token_logprobs for text in llm.score(prompts, 1)])
        assert llm.choice.forms == choices[1].forms
    assert found[0] == found[1]


def test_a_search_takes_decoding_into_account(quantised):
    with LLM(str(quantised.folder), hardware=laptop(dtype="float32"), dtype="float32", progress=False) as llm:
        job = Workload((8, 8), 4), llm.resources()
        found = llm.planner.choose(*job)
        llm.planner.constraints = replace(llm.planner.constraints, resident=False)
        searched = llm.planner.choose(*job)
        assert is_decoded(found) and searched.forms == found.forms
        assert llm.planner.choose(*job, searched.policy).prediction == searched.prediction
