"""What tells two models apart."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from h2o_flexgen.models.folder import weight_files
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.utils.files import samples


def fingerprint(spec: ModelSpec, weights: Path | None, tokenizer) -> str:
    """A hash of a model's configuration, samples of its weights, its tokenizer and chat template. It does not depend on
    paths and times: a copy is the same model.

    Args:
        weights: their folder or GGUF file; None for random ones.
        tokenizer: None if there is none.

    Raises:
        UserError: the weights cannot be read.
    """
    found = hashlib.sha256(repr((spec, weights is None)).encode())
    if weights is not None:
        for file in weight_files(weights) if weights.is_dir() else [weights]:
            found.update(samples(file))
    if tokenizer is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = json.loads(backend.to_str()) if backend else dict(sorted(tokenizer.get_vocab().items()))
        for name in ("truncation", "padding"):  # which encoding changes
            parts.pop(name, None)
        found.update(repr((parts, tokenizer.chat_template)).encode())
    return found.hexdigest()[:16]
