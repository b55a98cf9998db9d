"""A head that is read from disk a slice at a time, where memory is short: the same tokens from smaller buffers."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
import zoo
from gguf import GGMLQuantizationType as Type
from gguf_tools import write_gguf
from quantised_tools import WIDE
from safetensors.torch import load_file, save_file

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.kernels import linear
from h2o_flexgen.machine.pages import PAGE
from h2o_flexgen.planning import planner
from h2o_flexgen.planning.memory import plan_policy
from h2o_flexgen.storage.disk import File
from h2o_flexgen.storage.staging import SlicedTensor

ON_DISK = (0, 0, 100, 0, 100, 0)
#: more prompts than places, some behind the same prefix, and outputs that do not end together
PROMPTS = [[*range(5, 17), n, n + 1] for n in range(20, 25)] + [[7, 8], [30] * 9, [2, 50, 60], [9]]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 3, 6, 1, 9, 5, 2, 8, 7)]
#: {name: (what the checkpoint is, how it is computed with)}; `int8` keeps scales apart from codes
FORMATS = {
    "floats": ("float32", {}),
    "converted": ("bfloat16", {}),
    "int8": ("float32", dict(compress_weight="int8")),
    "int8, multiplied as stored": ("float32", dict(compress_weight="int8", compute="int8")),
    "Q4_0": ("Q4_0", {}),
    "Q8_0, multiplied in int8": ("Q8_0", dict(compute="int8")),
}


@pytest.fixture(scope="module")
def large_head(tmp_path_factory) -> zoo.Tiny:
    """Its head is larger than all layers together."""
    folder = tmp_path_factory.mktemp("large_head")
    return zoo.build("llama", folder, vocab_size=3000, num_hidden_layers=3, **WIDE, tie_word_embeddings=True)


@pytest.fixture
def checkpoint(large_head, tmp_path):
    def write(kind: str) -> str:
        if kind in Type.__members__:
            return str(write_gguf(tmp_path / "model.gguf", large_head, Type[kind]))
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text((large_head.folder / "config.json").read_text())
        state = load_file(large_head.folder / "model.safetensors")
        state = {name: tensor.to(getattr(torch, kind)) for name, tensor in state.items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return write


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(linear, "SLICE_BYTES", 1 << 16)


@pytest.fixture
def is_tight(monkeypatch):
    """Whether memory is a byte too small for a plan in which the head is staged whole."""
    found = [False]

    def plan(policy, shapes, workload, resources):
        placement, whole = plan_policy(policy, shapes, workload, resources)
        if not found[0]:
            return placement, whole
        less = replace(resources, limits=resources.limits | {"ram": whole.needed("ram") - 1})
        placement, memory = plan_policy(policy, shapes, workload, less)
        return placement, replace(memory, limits=resources.limits)

    monkeypatch.setattr(planner, "plan_policy", plan)
    return found


def opened(folder: str, overlap: bool = True, budget: KVBudget | None = None, **formats) -> LLM:
    policy = Policy(2, 2, ON_DISK, overlap, prefill_tokens=16)
    return LLM(folder, policy, budget, "cpu", "float32", **formats, progress=False)


def generated(llm: LLM, params=PARAMS) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS[: len(params)], params)]


@pytest.mark.parametrize("name, overlap", [(name, n % 3 > 0) for n, name in enumerate(FORMATS)])
def test_the_tokens_are_those_of_a_head_that_is_staged(checkpoint, is_tight, name, overlap):
    kind, formats = FORMATS[name]
    found = {}
    with opened(checkpoint(kind), overlap, **formats) as llm:
        for is_tight[0] in (False, True):
            tokens = generated(llm)
            scores = [s.token_logprobs for s in llm.score(PROMPTS[:6], prompt_len=2)]
            scores += [s.token_logprobs for s in llm.score(PROMPTS[:6])]
            assert (llm.choice.placement.sliced is not None) == is_tight[0]
            found[is_tight[0]] = tokens, scores
    assert found[True][0] == found[False][0]
    for sliced, staged in zip(found[True][1], found[False][1]):
        assert sliced == pytest.approx(staged, abs=1e-4)


def test_streams_read_it_too(large_head, is_tight):
    texts = {}
    with opened(str(large_head.folder), budget=KVBudget.from_size(8)) as llm:
        for is_tight[0] in (False, True):
            session = llm.session(count=3, chunk=5)
            assert (session.choice.placement.sliced is not None) == is_tight[0]
            outputs = session.generate(PROMPTS[:3], SamplingParams(max_tokens=6, ignore_eos=True))
            texts[is_tight[0]] = [o.token_ids for o in outputs]
            session.close()
    assert texts[True] == texts[False]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["floats", "converted", "int8"])
def test_a_pass_reads_it_once_and_the_plan_counts_the_buffers(checkpoint, is_tight, name, overlap):
    """However many chunks have logits."""
    kind, formats = FORMATS[name]
    moved = {}
    held = {}
    with opened(checkpoint(kind), overlap, **formats) as llm:
        for is_tight[0] in (False, True):
            generated(llm, [SamplingParams(max_tokens=6, ignore_eos=True)] * 4)
            moved[is_tight[0]] = llm.report["bytes_moved"]["disk_to_cpu"]
            held[is_tight[0]] = llm.runner.weights.held_bytes(cuda=False)
            weights = sum(n for _, label, n in llm.choice.plan.items if label.startswith("weight"))
            assert held[is_tight[0]] == weights
        (head,) = (t for t in llm.runner.weights._units[-1].values() if isinstance(t, SlicedTensor))
    count = -(-3000 // (1024 if name == "int8" and formats.get("compute") else 256))
    assert 0 <= moved[True] - moved[False] < 6 * count * 2 * PAGE
    assert held[True] + (1 + overlap) * head.stored.nbytes // 2 < held[False]


def test_a_head_that_several_groups_of_rows_need_is_staged(large_head, is_tight):
    is_tight[0] = True
    params = SamplingParams(max_tokens=2)
    with LLM(str(large_head.folder), Policy(64, 4, ON_DISK), device="cpu", dtype="float32", progress=False) as llm:
        llm.generate([[5, 6]] * 128, params)
        assert llm.choice.placement.sliced is not None
        llm.generate([[5, 6]] * 129, params)
        assert llm.choice.placement.sliced is None


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_a_read_error_or_an_interrupt_in_the_head_ends_the_job(large_head, is_tight, monkeypatch, overlap, error):
    """In a later pass, with the next slice in flight; and the job may be tried again."""
    is_tight[0] = True
    real = SlicedTensor.slices
    passes = []

    def broken(self, *args):
        raise UserError("Input/output error")

    threads = threading.active_count()
    with opened(str(large_head.folder), overlap) as llm:
        with monkeypatch.context() as patch:

            def failing(self):
                passes.append(self)
                for begin, part in real(self):
                    if len(passes) == 3 and begin:
                        patch.setattr(File, "read_at", broken)
                    yield begin, part
                    if len(passes) == 3 and error is KeyboardInterrupt:
                        raise KeyboardInterrupt

            patch.setattr(SlicedTensor, "slices", failing)
            with pytest.raises(error):
                generated(llm)
        assert len(passes) == 3 and threading.active_count() == threads
        assert [len(ids) for ids in generated(llm)] == [p.max_tokens for p in PARAMS]
