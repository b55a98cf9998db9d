"""Generates text in large batches with models that do not fit in memory."""

import os
from importlib import import_module

__version__ = "0.1.0"

_MODULES = {
    "LLM": "llm",
    "AnswersOutput": "engine.scoring",
    "CompletionOutput": "engine.outputs",
    "EmbeddingOutput": "engine.pooling",
    "KVBudget": "policy",
    "Losses": "planning.losses",
    "Policy": "policy",
    "PoolingParams": "engine.params",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.params",
    "ScoreOutput": "engine.outputs",
    "Session": "session",
    "Structured": "engine.structured",
    "UserError": "errors",
}
__all__ = list(_MODULES)


# Idle threads of torch (GNU's OpenMP) spin for milliseconds on cores that compiled loops and transfers need. With this,
# which must be set before torch is imported, they poll a thousand times, then sleep.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str):
    # lazily, since torch takes seconds to import
    if name not in _MODULES:
        raise AttributeError(f"module 'h2o_flexgen' has no attribute {name!r}")
    return getattr(import_module(f"h2o_flexgen.{_MODULES[name]}"), name)
