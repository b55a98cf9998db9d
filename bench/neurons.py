"""How many neurons of its MLPs a decode step of SmolLM2 needs: whether reading only those would save bytes.

python -m bench.neurons TEXT --output docs/benchmarks/neurons.json

FlexGen's future work is to keep the MLPs' heavy neurons in fast memory. A neuron's part in the output is its activation
times the norm of its column in the last matrix. For each token the neurons with the least parts are left out, as many
as keep the root of the sum of squares of these parts below a fraction of that of all. A step needs whatever one of its
sequences needs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from h2o_flexgen import LLM
from h2o_flexgen.commands.main import execute
from h2o_flexgen.commands.options import Parser
from h2o_flexgen.evaluation.origin import origin
from h2o_flexgen.kernels.attention import causal_attention
from h2o_flexgen.models import llama, parts
from h2o_flexgen.profiling import windows
from h2o_flexgen.profiling.layer_model import LayerModel
from h2o_flexgen.utils.files import rounded, to_json, write_text

#: sequences, and tokens of each; the step is that of the last one
SEQUENCES = 64
LENGTH = 128
BATCHES = (1, 8, 64)
#: fractions of the parts that are left out
ERRORS = (0.01, 0.1)


def needed(spec, w: dict[str, Tensor], x: Tensor, error: float) -> Tensor:
    """(N, inner) bool, the neurons that each token of x (N, E) needs."""
    gate, up = parts.projections(w, ("gate", "up"), x)
    part = parts.activation(spec.activation)(gate).mul_(up).abs().mul_(w["down.weight"].norm(dim=0))
    squares, order = part.square().sort(dim=1)
    is_left_out = squares.cumsum(1).sqrt() < error * squares.sum(1, keepdim=True).sqrt()
    return torch.ones_like(is_left_out).scatter_(1, order, ~is_left_out)


def run(args: argparse.Namespace) -> None:
    text = Path(args.text).read_text()
    found: dict[float, list[Tensor]] = {error: [] for error in ERRORS}
    plain = llama.mlp

    def watched(spec, w: dict[str, Tensor], x: Tensor) -> Tensor:
        last = x.unflatten(0, (SEQUENCES, LENGTH))[:, -1]
        for error, layers in found.items():
            layers.append(needed(spec, w, last, error))
        return plain(spec, w, x)

    with LLM(dtype="float32", progress=False) as llm:
        ids = windows.cut(text, llm.model.tokenizer, SEQUENCES, LENGTH)
        model = LayerModel(llm.model, progress=False)
        llama.mlp = watched
        try:
            model.run(ids, 0, lambda layer, *qkv: causal_attention(*qkv))
        finally:
            llama.mlp = plain
        name = llm.model.name
    rows = []
    for error, layers in found.items():
        for batch in BATCHES:
            unions = [each.view(-1, batch, each.shape[1]).any(1).float().mean().item() for each in layers]
            rows.append({"error": error, "sequences": batch, "share": fmean(unions), "least": min(unions)})
    result = origin(args) | {"model": name, "length": LENGTH, "rows": rows}
    write_text("--output", args.output, to_json(rounded(result, 4)) + "\n")


if __name__ == "__main__":
    parser = Parser("python -m bench.neurons", "How many neurons of its MLPs a decode step needs.")
    parser.add_argument("text", help="a file of plain text")
    parser.add_argument("--output", required=True)
    sys.exit(execute(parser, run))
