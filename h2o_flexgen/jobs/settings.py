"""The settings that decide the tokens of a job: its model, and how it is run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields

from h2o_flexgen import __version__
from h2o_flexgen.engine.params import PoolingParams, SamplingParams
from h2o_flexgen.formats import Int8, dtype_name
from h2o_flexgen.kv_cache import head_losses
from h2o_flexgen.kv_cache.layers import HeadLosses
from h2o_flexgen.llm import LLM
from h2o_flexgen.policy import KVBudget

#: the formats that matmuls in int8 read when manifests had `in_blocks`
OLD = {"int8", "int4", "Q8_0", "Q4_0", "Q4_1"}
#: sampling parameters that every manifest has
SINCE_THE_FIRST = "temperature top_k top_p max_tokens ignore_eos seed stop".split()
#: settings that are no options, in words
WORDS = {
    "files": "the model's files or tokenizer",
    "layers": "what the file of `kv_rule`'s option layers says",
    "operands": "what matmuls in int8 read of the weights",
}


def settings_of(llm: LLM, params: SamplingParams | PoolingParams, longest_prompt: int) -> dict:
    """All that decides the tokens of a row, except the row itself and the slots of its KV cache."""
    budget = llm.kv_budget
    layers = head_losses(budget.rule) if isinstance(budget, KVBudget) else None
    return {
        "model": llm.model.name,
        "model_revision": llm.model.revision,
        "files": llm.model.fingerprint,
        "dtype": dtype_name(llm.dtype),
        "compress_weight": llm.model.compress_weight,
        "compress_cache": llm.compress_cache,
        "compute": llm.model.compute,
        "operands": llm.model.operands,
        "kv_budget": budget.to_dict(longest_prompt) if isinstance(budget, KVBudget) else budget,
        "layers": layers and _digest(layers),  # the budget only names a file
        **(asdict(params) if isinstance(params, PoolingParams) else _sampling(params)),
        "chat_template_kwargs": llm.model.chat.template_kwargs or None,
        "version": __version__,
    }


def _sampling(params: SamplingParams) -> dict:
    """None for what manifests of earlier versions lack, and what is not asked for."""
    found = {}
    for each in fields(params):
        value = getattr(params, each.name)
        is_asked = each.name in SINCE_THE_FIRST or value != each.default
        found[each.name] = json.loads(json.dumps(value, default=vars)) if is_asked else None
    found["gen_len"] = found.pop("max_tokens")
    return found


def _digest(losses: HeadLosses) -> str:
    return hashlib.sha256(repr((losses.budgets, losses.losses)).encode()).hexdigest()[:16]


def changes(old: dict, new: dict) -> list[str]:
    """Which settings differ, in words. The location and the revision of the same files do not matter."""
    names = [name for name in new if old.get(name) != new[name]]
    if "compute" in names or _are_same_matmuls(old, new.get("operands") or {}):
        names = [name for name in names if name != "operands"]
    if "files" not in names:
        names = [name for name in names if name not in ("model", "model_revision")]
    return [WORDS.get(name) or f"`{name}` {old.get(name)!r}, now {new[name]!r}" for name in names]


def _are_same_matmuls(old: dict, operands: dict[str, str]) -> bool:
    """Whether a manifest of an earlier version, which only says if some weights are multiplied as stored that are not
    in `Int8`, means these operands. Other formats than `OLD` were exact then."""
    in_blocks = any(name != Int8.name for name in operands.values())
    return "operands" not in old and operands.keys() <= OLD and bool(old.get("in_blocks")) == in_blocks
