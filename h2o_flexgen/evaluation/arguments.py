"""Arguments of `LLM` as the configuration of another program gives them: names, numbers and GiB."""

from __future__ import annotations

import math

from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache import check_rule
from h2o_flexgen.policy import DEFAULT_RULE, GIB, KVBudget

#: arguments that LLM takes under the same names
PASSED = "path revision policy device dtype compress_weight compress_cache compute offload_dir".split()
BUDGET = "hh_ratio recent_ratio hh_size recent_size".split()
#: in GiB
LIMITS = "mem gpu_mem cpu_mem disk_mem".split()
#: all that `llm_arguments` reads
LLM_ARGUMENTS = [*PASSED, *BUDGET, "kv_rule", *LIMITS]


def llm_arguments(given: dict) -> dict:
    """Arguments of `LLM` from those of LLM_ARGUMENTS: the KV budget in numbers, limits on memory in GiB, the others as
    `LLM` takes them. Raises UserError for a value of a wrong type or out of range."""
    found = {name: given[name] for name in PASSED if name in given}
    sizes = {name: given.get(name) for name in BUDGET}
    limits = {name: given.get(name) for name in LIMITS}
    check_numbers(sizes | limits)
    found["kv_budget"] = _budget(given.get("kv_rule"), sizes)
    return found | {name: _bytes(name, gib) for name, gib in limits.items()}


def check_numbers(arguments: dict) -> None:
    """Raises UserError for a value that is neither a number nor None."""
    for name, value in arguments.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"`{name}` must be a number, not {value!r}")


def _bytes(name: str, gib: float | None) -> int | None:
    if gib is not None and not 0 < gib < math.inf:
        raise UserError(f"`{name}` must be more than 0 GiB, not {gib}")
    return gib and int(gib * GIB)


def _budget(kv_rule: str | None, sizes: dict) -> KVBudget | None:
    """The KV budget, None for a full cache."""
    if kv_rule is not None:
        check_rule(kv_rule)
    if any(value is not None for value in sizes.values()):
        return KVBudget(**sizes, rule=kv_rule or DEFAULT_RULE)
    if kv_rule is not None:
        raise UserError("`kv_rule` says which tokens a KV budget keeps: give one too, such as hh_ratio=0.2")
    return None
