"""Structured output with the demo model: whether texts match, and what masks cost.

    python -m bench.structured

Random JSON schemas (objects, arrays, enums, patterns, unions, numbers with bounds), one a row, drawn at temperature 1:
every text that ends must be valid by the package jsonschema. Then 64 rows of one length with and without a schema that
never ends, in turns, in RAM and with weights and cache on disk. Results go to docs/benchmarks/structured.json.
"""

from __future__ import annotations

import json
import random
import time
from statistics import median

import jsonschema

from bench import common
from h2o_flexgen import LLM, Policy, SamplingParams, Structured, UserError

SCHEMAS = 500
ROWS = 64
TOKENS = 96
RUNS = 3
#: an output that follows it does not end by itself
ENDLESS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"title": {"type": "string"}, "count": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
        "required": ["title", "count", "kind"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
POLICIES = {"RAM": Policy(ROWS), "disk": Policy(ROWS, percent=(0, 0, 0, 0, 0, 0))}


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    """A schema of up to three levels."""
    leaves = [random_string, random_number, random_enum]
    nodes = [random_object, random_array, random_union]
    return rng.choice(leaves if depth > 2 else nodes + leaves * (depth > 0))(rng, depth)


def random_enum(rng: random.Random, depth: int) -> dict:
    return {"enum": rng.sample(["red", 1, None, "blue", 2.5, True], 3)}


def random_string(rng: random.Random, depth: int) -> dict:
    kinds = [{"maxLength": rng.randint(3, 30)}, {"pattern": r"^[A-Z][a-z]{2,8}$"}, {"pattern": r"^\d{4}-\d{2}$"}]
    return {"type": "string"} | rng.choice([*kinds, {"format": "date"}, {"minLength": 2, "maxLength": 9}])


def random_number(rng: random.Random, depth: int) -> dict:
    low = rng.randint(-50, 50)
    return {"type": rng.choice(["integer", "number"]), "minimum": low, "maximum": low + rng.randint(0, 500)}


def random_object(rng: random.Random, depth: int) -> dict:
    names = rng.sample(["name", "age", "tags", "address", "x", "is_open", "größe", 'a "b"'], rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: random_schema(rng, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_array(rng: random.Random, depth: int) -> dict:
    return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 2), "maxItems": 3}


def random_union(rng: random.Random, depth: int) -> dict:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def schemas(count: int) -> tuple[list[dict], int]:
    """Schemas that can be used, and how many cannot."""
    rng = random.Random(0)
    found: list[dict] = []
    refused = 0
    while len(found) < count:
        schema = random_schema(rng)
        try:
            Structured(json=schema).check()
            found.append(schema)
        except UserError:
            refused += 1
    return found, refused


def validity() -> dict:
    """How many texts end, and whether they are valid."""
    wanted, refused = schemas(SCHEMAS)
    params = [
        SamplingParams(temperature=1.0, seed=n, max_tokens=160, structured=Structured(json=schema))
        for n, schema in enumerate(wanted)
    ]
    prompts = [[{"role": "user", "content": f"Write JSON for {json.dumps(schema)[:400]}"}] for schema in wanted]
    ended = valid = 0
    with LLM(policy=Policy(ROWS), device="cpu", progress=False) as llm:
        for output, schema in zip(llm.chat(prompts, params), wanted):
            if output.outputs[0].finish_reason == "stop":
                ended += 1
                valid += is_valid(output.outputs[0].text, schema)
    return {"schemas": SCHEMAS, "refused": refused, "ended": ended, "valid": valid}


def is_valid(text: str, schema: dict) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)  # Python's check of dates would refuse the year 0000
        return True
    except (ValueError, jsonschema.ValidationError) as e:
        print(f"not valid: {text!r} by {json.dumps(schema)}: {e}", flush=True)
        return False


def throughput(policy: Policy) -> dict:
    """Tokens/s without and with masks, in turns."""
    prompts = [[{"role": "user", "content": f"List some things, number {n}."}] for n in range(ROWS)]
    ways = {"plain": None, "structured": Structured(json=ENDLESS)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with LLM(policy=policy, device="cpu", progress=False) as llm:
        llm.chat(prompts[:2], SamplingParams(max_tokens=4, structured=ways["structured"]))
        for _ in range(RUNS):
            for name, structured in ways.items():
                params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, structured=structured)
                begin = time.perf_counter()
                outputs = llm.chat(prompts, params)
                made = sum(len(output.outputs[0].token_ids) for output in outputs)
                rates[name].append(made / (time.perf_counter() - begin))
    found = {name: round(median(each), 1) for name, each in rates.items()}
    ratios = sorted(b / a for a, b in zip(rates["plain"], rates["structured"]))
    return found | {"ratio": round(median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios]}


def main() -> None:
    result = {"validity": validity()}
    print(result, flush=True)
    for name, policy in POLICIES.items():
        result[name] = throughput(policy)
        print(name, result[name], flush=True)
    common.save("structured", result)


if __name__ == "__main__":
    main()
