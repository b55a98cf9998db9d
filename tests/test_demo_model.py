"""The demo model is a real one: its tokens against transformers, which reads the GGUF file itself, and the oracle."""

from __future__ import annotations

import pytest
import torch
from oracle import LlamaOracle

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams
from h2o_flexgen.jobs.input import builtin_prompts
from h2o_flexgen.models import source

QUESTIONS = (
    "What is the capital of France?",
    "What is 12 plus 30?",
    "Translate 'good morning' into Spanish.",
)
LENGTH = 6  # tokens of an output
POLICIES = {
    "resident": dict(gpu_batch_size=6),
    "disk": dict(gpu_batch_size=3, num_gpu_batches=2, percent=(0, 0, 0, 0, 0, 0)),
    "mixed": dict(gpu_batch_size=2, num_gpu_batches=3, percent=(40, 20, 30, 30, 50, 20), overlap=False),
}


@pytest.fixture(scope="module", autouse=True)
def demo_model(demo_home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H2O_FLEXGEN_HOME", str(demo_home))
        yield source.find_model(None, weights=False)[0]


@pytest.fixture(autouse=True)
def same_home(private_folders, monkeypatch, demo_home):
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(demo_home))


@pytest.fixture(scope="module")
def hf(demo_model):
    from transformers import AutoModelForCausalLM

    how = dict(gguf_file=demo_model.name, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(demo_model.parent, **how).eval()


def generate(prompts, max_tokens: int, budget=None, **policy) -> tuple[list[list[int]], list[list[int]]]:
    """(token ids of the prompts, of the outputs)."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with LLM(None, Policy(**policy), budget, device="cpu", dtype="float32", progress=False) as llm:
        outputs = llm.generate(prompts(llm), params)
    return [o.prompt_token_ids for o in outputs], [o.outputs[0].token_ids for o in outputs]


def real_prompts(llm: LLM) -> list:
    """Questions, and as many passages of English prose."""
    questions = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return questions + builtin_prompts(llm.tokenizer, llm.spec.vocab, len(QUESTIONS), 48)


@pytest.fixture(scope="module")
def tokens(demo_model):
    return generate(real_prompts, LENGTH, **POLICIES["resident"])


def test_the_tokens_are_those_of_transformers(hf, tokens):
    """One pass over prompt and output tells what transformers would take as each next token."""
    for prompt, output in zip(*tokens):
        with torch.inference_mode():
            logits = hf(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "resident"])
def test_they_are_the_same_on_all_tiers(tokens, name):
    assert generate(real_prompts, LENGTH, **POLICIES[name]) == tokens


def test_with_h2o_they_are_those_of_the_oracle(hf):
    """Of a passage, whose every layer and head evicts."""
    (prompt,), (output,) = generate(lambda llm: real_prompts(llm)[3:4], 8, KVBudget.from_size(8, 8), gpu_batch_size=1)
    trace = LlamaOracle(hf).generate(prompt, 8, 8, 8)
    assert min(map(min, trace.evicted)) > 0
    assert trace.tokens == output
