"""The text model of a multimodal checkpoint gives the tokens of the text model alone."""

from __future__ import annotations

import json

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

from h2o_flexgen.models.registry import read_spec

VISION = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)


#: model_type of a multimodal checkpoint -> the variant that is its text model
MODELS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text_experts_and_values_that_are_keys"}


@pytest.fixture(scope="module", params=MODELS)
def text(request, tmp_path_factory) -> zoo.Tiny:
    return zoo.build(MODELS[request.param], tmp_path_factory.mktemp("text"))


def multimodal(text: zoo.Tiny, folder, rename) -> zoo.Tiny:
    """The same model as part of a multimodal one, with its tensors renamed."""
    folder.mkdir()
    state = {rename(name): tensor for name, tensor in load_file(text.folder / "model.safetensors").items()}
    state["vision_tower.layers.0.input_layernorm.weight"] = torch.zeros(3)
    save_file(state, folder / "model.safetensors")
    model_type = next(model_type for model_type, name in MODELS.items() if name == text.name)
    config = {"model_type": model_type, "eos_token_id": [2, 9], "text_config": text.hf.config.to_dict()}
    (folder / "config.json").write_text(json.dumps(config))
    return zoo.Tiny(text.name, text.hf, folder)


RENAMES = {
    "published": lambda name: f"language_model.{name}",
    "transformers_5": lambda name: name.replace("model.", "model.language_model."),
    "plain": lambda name: name,
}


@pytest.mark.parametrize("spelling", RENAMES)
def test_its_tokens_are_those_of_the_text_model(tmp_path, run, text, spelling):
    model = multimodal(text, tmp_path / "model", RENAMES[spelling])
    prompts = text.clear_cut_prompts([9, 4], 8)
    assert read_spec(model.folder).eos == {2, 9}
    outputs = run(model, prompts, 8, gpu_batch_size=2)
    assert [o.token_ids for o in outputs] == [t.tokens for t in text.references(prompts, 8)]


def test_a_checkpoint_that_transformers_writes(tmp_path, run, text):
    import transformers

    of = "Gemma3" if text.name == "gemma3_text" else "Gemma4"
    vision = VISION if of == "Gemma3" else VISION | dict(num_key_value_heads=2, head_dim=4)
    config = getattr(transformers, f"{of}Config")(text_config=text.hf.config.to_dict(), vision_config=vision)
    config.mm_tokens_per_image = 4
    model = getattr(transformers, f"{of}ForConditionalGeneration")(config).float().eval()
    model.model.language_model.load_state_dict(text.hf.model.state_dict())
    model.tie_weights()
    model.save_pretrained(tmp_path / "model")
    prompts = text.clear_cut_prompts([9, 4], 8)
    outputs = run(zoo.Tiny(text.name, text.hf, tmp_path / "model"), prompts, 8)
    assert [o.token_ids for o in outputs] == [t.tokens for t in text.references(prompts, 8)]
