"""Generates text in large batches with models that do not fit in memory."""

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "KVBudget",
    "Policy",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "UserError",
]


def __getattr__(name: str):
    # torch takes seconds to import: not before it is needed
    if name in ("LLM", "CompletionOutput", "RequestOutput", "ScoreOutput"):
        from h2o_flexgen import llm as module
    elif name == "SamplingParams":
        from h2o_flexgen.engine import sampling as module
    elif name in ("KVBudget", "Policy"):
        from h2o_flexgen import policy as module
    elif name == "UserError":
        from h2o_flexgen import errors as module
    else:
        raise AttributeError(f"module 'h2o_flexgen' has no attribute {name!r}")
    return getattr(module, name)
