"""The recipes in docs/ work: their code makes a model family, a cache rule and a format that pass the tests of all
others."""

from __future__ import annotations

import json
import re
import sys
from types import ModuleType

import gguf
import numpy as np
import oracle
import pytest
import torch
import zoo
from command_tools import FP32
from gguf import GGMLQuantizationType as Type
from machines import ROOT, T4, laptop, planner_of
from test_parity import test_tokens_are_those_of_transformers_and_of_the_oracle as check_tokens

from h2o_flexgen import LLM, KVBudget, UserError, kv_cache
from h2o_flexgen.commands.main import main
from h2o_flexgen.formats import GGUF, Blocks, ggml
from h2o_flexgen.kv_cache import RULES
from h2o_flexgen.models import registry
from h2o_flexgen.models.spec import Config
from h2o_flexgen.planning.memory import Resources
from h2o_flexgen.planning.workload import Workload
from tests import test_formats
from tests.kv_cache import test_rule_exactness, test_rules
from tests.models import test_gguf

pytest_plugins = ["command_tools"]


def blocks(document: str) -> dict[str, str]:
    """{file: code} of a document's Python blocks that begin with the name of a file."""
    text = (ROOT / "docs" / document).read_text()
    return dict(re.findall(r"```python\n# (\S+\.py(?: \(\w+\))?)\n(.*?)```", text, re.DOTALL))


def added(code: str, module: ModuleType) -> dict:
    """The names of a file after a block was added to it; the module itself does not change."""
    names = dict(vars(module))
    exec(code, names)
    return names


def new_module(patch: pytest.MonkeyPatch, name: str, code: str) -> ModuleType:
    made = ModuleType(name)
    patch.setitem(sys.modules, name, made)
    exec(compile(code, name, "exec"), vars(made))
    return made


# a model family

MODEL = blocks("adding-a-model.md")
NEW_ZOO = added(MODEL["tests/zoo.py"], zoo)["VARIANTS"]["stablelm"]


@pytest.fixture(scope="module")
def family():
    with pytest.MonkeyPatch.context() as patch:
        made = new_module(patch, "h2o_flexgen.models.stablelm", MODEL["h2o_flexgen/models/stablelm.py"])
        named = added(MODEL["h2o_flexgen/models/registry.py"], registry)["FAMILIES"]
        patch.setattr(registry, "FAMILIES", (*registry.FAMILIES, *named[1:]))
        patch.setattr(oracle, "ORACLES", added(MODEL["tests/oracle.py"], oracle)["ORACLES"])
        for name, changes in NEW_ZOO.items():
            patch.setitem(zoo.FAMILY, name, "stablelm")
            patch.setitem(zoo.CONFIGS, name, {**zoo.LLAMA, **changes})
        registry._named.cache_clear()
        yield made
    registry._named.cache_clear()


@pytest.mark.parametrize("name", NEW_ZOO)
def test_the_new_family_gives_the_tokens_of_transformers_and_of_the_oracle(family, tiny, run, name):
    check_tokens(tiny, run, name)


def test_the_new_family_has_the_parameters_of_its_published_checkpoint(family):
    spec = registry.named_spec("stablelm-3b-4e1t")
    shapes = {name: shape for layer in family.tensors(spec) for name, shape in layer.shapes.items()}
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 2_795_443_200


def test_a_spec_with_more_fields_keeps_those_of_the_family_it_extends(monkeypatch):
    granite = new_module(monkeypatch, "h2o_flexgen.models.granite", MODEL["h2o_flexgen/models/granite.py"])
    config = zoo.LLAMA | {"model_type": "llama", "rms_norm_eps": 1e-3}
    spec = granite.spec(Config(config | {"embedding_multiplier": 12.0}))
    assert spec.embedding_multiplier == 12
    assert vars(registry.spec_of(config)).items() <= (vars(spec) | {"model_type": "llama"}).items()


def test_the_new_family_refuses_what_it_does_not_compute(family):
    config = zoo.LLAMA | {"model_type": "stablelm", "hidden_size": 32}
    assert registry.spec_of(config).rope is not None
    with pytest.raises(UserError, match="qk_layernorm"):
        registry.spec_of(config | {"qk_layernorm": True})


# a family with experts


@pytest.fixture
def experts(monkeypatch):
    new_module(monkeypatch, "h2o_flexgen.models.olmoe", MODEL["h2o_flexgen/models/olmoe.py"])
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, "olmoe"))
    names = added(MODEL["tests/oracle.py (experts)"], oracle)
    monkeypatch.setattr(oracle, "ORACLES", oracle.ORACLES | {"olmoe": names["OlmoeOracle"]})
    monkeypatch.setitem(zoo.FAMILY, "olmoe", "olmoe")
    monkeypatch.setitem(zoo.CONFIGS, "olmoe", {**zoo.LLAMA, "num_experts": 5, "num_experts_per_tok": 2})
    registry._named.cache_clear()
    yield
    registry._named.cache_clear()


def test_the_new_family_with_experts_gives_the_tokens_of_transformers_and_of_the_oracle(experts, tiny, run):
    check_tokens(tiny, run, "olmoe")


# a cache rule

RULE = blocks("adding-a-rule.md")


@pytest.fixture
def rule(monkeypatch):
    """The rule's class, registered."""
    code = RULE["h2o_flexgen/kv_cache/tova.py"]
    found = new_module(monkeypatch, "h2o_flexgen.kv_cache.tova", code).TovaCache
    rules = added(RULE["h2o_flexgen/kv_cache/__init__.py"], kv_cache)["RULES"]
    assert rules == {**RULES, "tova": found}
    monkeypatch.setitem(RULES, "tova", found)
    monkeypatch.setattr(oracle, "RULES", added(RULE["tests/oracle.py"], oracle)["RULES"])
    return found


@pytest.mark.parametrize("name, placement, options", test_rules.CASES)
def test_the_new_rule_gives_the_tokens_of_its_oracle(rule, tiny, run, name, placement, options):
    test_rules.assert_tokens_of_the_oracle(run, tiny(name), f"tova:{options}", placement)


def test_the_new_rule_keeps_other_tokens_than_h2o(rule, tiny):
    model = tiny()
    (prompt,) = model.prompts([40])
    assert model.reference(prompt, 20, 4, 4, "tova").kept != model.reference(prompt, 20, 4, 4, "h2o").kept


def test_the_new_rule_keeps_what_its_oracle_keeps(rule):
    test_rule_exactness.test_random_tensors_keep_what_the_oracle_keeps("tova")


def test_a_rule_may_know_its_layer(monkeypatch):
    code = RULE["h2o_flexgen/kv_cache/layered.py"]
    rule = new_module(monkeypatch, "h2o_flexgen.kv_cache.layered", code).LayeredCache(4, 4)
    assert rule.in_layer(2).layer == 2 and rule.options().keys() == RULES["h2o"](4, 4).options().keys()


def test_the_new_rule_is_measured_beside_h2o(rule, texts, tmp_path):
    book = tmp_path / "book.txt"
    output = tmp_path / "tova.json"
    book.write_text((ROOT / "README.md").read_text()[:4000])
    (command,) = re.findall("(?m)^h2o-flexgen quality (.*)$", (ROOT / "docs" / "adding-a-rule.md").read_text())
    for name, value in {"book.txt": book, "MODEL": texts, "tova.json": output}.items():
        command = command.replace(name, str(value))
    lengths = ("--prompt-len", "20", "--gen-len", "20")
    assert main(["quality", *command.split(), *FP32, *lengths]) == 0
    assert [row["rule"] for row in json.loads(output.read_text())["rows"]] == ["full", *["h2o"] * 3, *["tova"] * 3]


def test_the_new_rule_is_an_option_that_reports_and_policy_files_keep(rule, cli, model, tmp_path):
    report = tmp_path / "report.json"
    policy = tmp_path / "policy.json"
    job = ("--model", model, *FP32, "--prompt-len", 20, "--gen-len", 3, "--num-prompts", 2, "--report", report)
    budget = {"heavy": 4, "recent": 4, "rule": "tova:first=1"}
    code, out, err = cli(*job, "--hh-ratio", 0.2, "--kv-rule", "tova:first=1")
    assert code == 0, err
    assert "4 heavy + 4 recent slots (tova:first=1)" in out
    assert json.loads(report.read_text())["kv_budget"] == budget
    policy.write_text(json.dumps({"policy": {}, "kv_budget": budget}))
    assert LLM(str(model), str(policy)).kv_budget == KVBudget.from_size(4, 4, "tova:first=1")


def test_the_search_hands_the_new_rule_on(rule, capsys, tmp_path):
    (tmp_path / "laptop.json").write_text(laptop().to_json())
    job = ("--model", "facebook/opt-1.3b", "--num-prompts", "8", "--hardware", str(tmp_path / "laptop.json"), "--json")
    assert main(["search", *job, "--hh-ratio", "0.2", "--kv-rule", "tova"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kv_budget"]["rule"] == "tova"
    assert "--kv-rule tova" in result["command"]
    assert main(["search", *job, "--hh-ratio", "auto", "--kv-rule", "tova"]) == 2
    assert "--hh-ratio auto is for --kv-rule voted" in capsys.readouterr().err


@pytest.mark.parametrize("profile", [laptop(), T4], ids=["cpu", "cuda"])
def test_the_new_rule_is_predicted_at_the_rates_of_h2o(rule, profile):
    def predicted(name: str):
        planner = planner_of(profile, "facebook/opt-6.7b")
        job = Workload((512,) * 32, 32)
        resources = Resources.of(profile, dict.fromkeys(("gpu", "cpu", "disk")))
        return planner.choose(job, resources, kv_budget=KVBudget.from_ratio(0.2, rule=name)).prediction

    assert predicted("tova") == predicted("h2o")


# a format

FORMAT = blocks("formats.md")


class New4:
    """What the package `gguf` would know about the new type."""

    @staticmethod
    def quantize(data: np.ndarray) -> np.ndarray:
        rows = data.reshape(len(data), -1, 32)
        largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=-1, keepdims=True), axis=-1)
        scale = (largest / 8).astype(np.float16)  # of either sign, so that the largest code is used
        codes = (np.round(rows / np.where(scale == 0, 1, scale.astype(np.float32))) + 7).clip(0, 15).astype(np.uint8)
        packed = codes[..., :16] << 4 | codes[..., 16:]
        return np.concatenate([packed, scale.view(np.uint8)], axis=-1).reshape(len(data), -1)

    @staticmethod
    def dequantize(raw: np.ndarray) -> np.ndarray:
        stored = np.ascontiguousarray(raw).reshape(len(raw), -1, 18)
        codes = np.concatenate([stored[..., :16] >> 4, stored[..., :16] & 15], axis=-1)
        scale = stored[..., 16:].copy().view(np.float16).astype(np.float32)
        return ((codes.astype(np.float32) - 7) * scale).reshape(len(raw), -1)


@pytest.fixture(scope="module")
def new_type():
    """The type in GGUF files, registered here and in the package."""
    with pytest.MonkeyPatch.context() as patch:
        made = int.__new__(Type, 250)
        made._name_ = "NEW4"
        made._value_ = 250
        patch.setitem(Type._value2member_map_, made.value, made)
        patch.setitem(Type._member_map_, made.name, made)
        patch.setitem(gguf.GGML_QUANT_SIZES, made, (32, 18))
        patch.setitem(gguf.quants._type_traits, made, New4)
        layout = added(FORMAT["h2o_flexgen/formats/ggml.py"], ggml)["LAYOUTS"]["NEW4"]
        patch.setitem(GGUF, "NEW4", Blocks("NEW4", layout))
        yield made


@pytest.fixture(scope="module")
def new_llama(new_type, tmp_path_factory) -> zoo.Tiny:
    return test_gguf.quantised_llama(tmp_path_factory.mktemp("new"), new_type)


def test_the_new_format_decodes_as_it_is_defined(new_type):
    test_formats.test_a_gguf_type_decodes_as_in_the_package(None, "NEW4", torch.float32)
    test_formats.test_weights_that_the_package_encodes_come_close("NEW4")
    test_formats.test_conversion_to_int8_gives_every_row_one_scale(None, GGUF["NEW4"], 0)


def test_the_new_format_is_streamed_as_stored(new_llama, run, tmp_path):
    test_gguf.test_its_matrices_are_read_in_place(new_llama, tmp_path)
    where = test_gguf.ON_DISK
    test_gguf.test_a_quantised_llama_gives_the_tokens_of_transformers(new_llama, run, where, (3, 3))


def test_the_new_format_is_decoded_at_loading_where_there_is_room(new_llama):
    test_gguf.test_it_is_decoded_on_loading_where_there_is_room(new_llama)


@pytest.mark.parametrize("as_stored", [False, True], ids=["codes_of_8_bits", "as_stored"])
def test_the_new_format_is_multiplied_in_int8(new_llama, monkeypatch, request, as_stored):
    where = test_gguf.ON_DISK
    test_gguf.test_its_matmuls_in_int8_are_those_of_the_oracle(new_llama, monkeypatch, request, where, as_stored)
