"""The first layers of the demo model, whose weights are real: their tokens against transformers, which reads the GGUF
file itself, and the oracle."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import pytest
import torch
import zoo
from oracle import LlamaOracle

from h2o_flexgen import LLM, Policy, SamplingParams
from h2o_flexgen.models import source

LAYERS = 3
VOCAB = 49152
PROMPTS = [random.Random(n).choices(range(VOCAB), k=n) for n in (5, 12, 30, 48)]
LENGTH = 6  # tokens of an output
POLICIES = {
    "resident": dict(gpu_batch_size=4),
    "disk": dict(gpu_batch_size=2, num_gpu_batches=2, percent=(0, 0, 0, 0, 0, 0)),
    "mixed": dict(gpu_batch_size=1, num_gpu_batches=3, percent=(40, 20, 30, 30, 50, 20), overlap=False),
}


@pytest.fixture(scope="module")
def first_layers(demo_home, tmp_path_factory) -> Path:
    """The demo model without its other layers and its tokenizer, which take transformers half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H2O_FLEXGEN_HOME", str(demo_home))
        reader = gguf.GGUFReader(source.find_model(None, weights=False)[0])
    path = tmp_path_factory.mktemp("first_layers") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if key.startswith(("llama.", "general.")) and key != "general.architecture":
            value = LAYERS if key == "llama.block_count" else field.contents()
            writer.add_key_value(key, value, field.types[0])
    for tensor in reader.tensors:
        layer = tensor.name.split(".")[1]
        if not layer.isdigit() or int(layer) < LAYERS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def hf(first_layers):
    from transformers import AutoModelForCausalLM

    how = dict(gguf_file=first_layers.name, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(first_layers.parent, **how).eval()


def generate(model: Path, prompts, max_tokens: int, budget=None, **policy) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with LLM(str(model), Policy(**policy), budget, device="cpu", dtype="float32", progress=False) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_tokens_are_those_of_transformers_on_all_tiers(first_layers, hf, policy):
    """One pass over prompt and output gives what transformers would take as each next token."""
    for prompt, output in zip(PROMPTS, generate(first_layers, PROMPTS, LENGTH, **policy), strict=True):
        with torch.inference_mode():
            logits = hf(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output


def test_with_h2o_they_are_those_of_the_oracle(first_layers, hf):
    """Every layer and head evicts."""
    (output,) = generate(first_layers, PROMPTS[-1:], 8, zoo.sized(8, 8))
    trace = LlamaOracle(hf).generate(PROMPTS[-1], 8, 8, 8)
    assert min(map(min, trace.evicted)) > 0
    assert trace.tokens == output
