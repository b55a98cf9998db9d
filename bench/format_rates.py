"""Measure rates of int8 and other matmuls, conversions included, of decoding quantised weights, and of attention over
a quantised cache.

python -m bench.format_rates --output docs/benchmarks/format_rates.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from math import prod
from statistics import median

import torch

from h2o_flexgen.commands.main import execute
from h2o_flexgen.commands.options import Parser
from h2o_flexgen.evaluation.origin import origin
from h2o_flexgen.formats import GGUF, Blocks, Int4, Int8, KVFormat
from h2o_flexgen.formats.forms import COMPRESSED, cache_format
from h2o_flexgen.kernels import linear
from h2o_flexgen.kernels.attention import cached_attention
from h2o_flexgen.kernels.int8 import UNPACKED, Int8Weight, can_pack, int8_linear, pack, prepare, takes_blocks
from h2o_flexgen.utils.files import rounded, to_json, write_text

#: (out, in) of the matrices
SHAPES = ((16384, 4096), (4096, 16384), (8192, 2048), (2048, 8192))
ROWS = (8, 32, 128, 512)
#: a few columns of the activations are LARGE times the rest, as in a model
LARGE_COLUMNS = 4
LARGE = 50.0
#: formats of weights, and shape of the matrix that is decoded, or multiplied as stored
FORMATS = (Int8(), Int4(64), *GGUF.values())
DECODED = (4096, 4096)
#: matrices of a format that take turns, so that they come from RAM
TURNS = 3
#: sequences, KV heads, queries per KV head, head size, slots
CACHES = ((16, 8, 4, 64, 512), (16, 8, 4, 128, 1024), (8, 32, 1, 64, 205))
#: runs of each job, the first to warm up
ROUNDS = 6
#: total time after which a job does not run again
SECONDS = 3.0


def median_seconds(jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median time of each job; they take turns."""
    times = {name: [] for name in jobs}
    for _ in range(ROUNDS):
        for name, job in jobs.items():
            if sum(times[name]) < SECONDS:
                start = time.perf_counter()
                job()
                times[name].append(time.perf_counter() - start)
    return {name: median(each[1:] or each) for name, each in times.items()}


def matmuls(out: int, width: int) -> list[dict]:
    """TOP/s of matmuls with an (out, width) matrix, for each number of rows."""
    codes = torch.randint(-127, 128, (out, width), dtype=torch.int8)
    scale = torch.rand(out)
    streamed = Int8Weight(codes, scale)
    packed = can_pack() and Int8Weight(pack(codes), scale)
    dense = torch.randn(out, width)
    half = dense.bfloat16()
    found = []
    fours = Int4(64).view(torch.empty(Int4(64).nbytes((out, width)), dtype=torch.uint8), (out, width))
    fours.format.encode(dense, fours.raw)
    for count in ROWS:
        x = torch.randn(count, width)
        x[:, :LARGE_COLUMNS] *= LARGE
        halves = x.bfloat16()
        eights = torch.randint(-127, 128, (count, width), dtype=torch.int8)
        jobs = {"_int_mm": partial(torch._int_mm, eights, codes.t())}
        jobs |= {name: partial(int8_linear, halves, streamed, kernel=name) for name in UNPACKED}
        if packed:
            jobs["packed"] = partial(int8_linear, halves, packed)
        if takes_blocks():
            jobs["int4"] = partial(int8_linear, halves, fours)
        jobs["bf16"] = partial(torch.nn.functional.linear, halves, half)
        jobs["fp32"] = partial(torch.nn.functional.linear, x, dense)
        operations = 2 * count * out * width
        rates = {name: operations / seconds / 1e12 for name, seconds in median_seconds(jobs).items()}
        best = max(rates[name] for name in (*UNPACKED, "packed") if name in rates)
        found.append({"shape": f"{out} x {width}", "rows": count, "tops": rates, "of_int_mm": best / rates["_int_mm"]})
    return found


def decoding() -> list[dict]:
    """G elements/s of decoding, for each format."""
    weight = torch.randn(DECODED)
    found = []
    for each in FORMATS:
        raw = torch.zeros(each.nbytes(DECODED), dtype=torch.uint8)
        if each.name in ("int8", "int4"):
            each.encode(weight, raw)
        stored = each.view(raw, DECODED)
        eights = Int8().view(torch.empty(Int8().nbytes(DECODED), dtype=torch.uint8), DECODED)
        outs = {name: torch.empty(DECODED, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")}
        jobs = {name: partial(stored.decode, out) for name, out in outs.items()}
        if each.name != "int8":
            jobs["int8"] = partial(stored.to_int8, eights)
        rates = {name: weight.numel() / seconds / 1e9 for name, seconds in median_seconds(jobs).items()}
        found.append({"format": each.name, **rates})
    return found


def blocks() -> list[dict]:
    """TOP/s of matmuls with blocks as stored, for each format and number of rows; the formats take turns."""
    weights = {}
    for form in FORMATS:
        if isinstance(form, Blocks) and form.tile is not None:
            raw = torch.randint(0, 60, (TURNS, form.nbytes(DECODED)), dtype=torch.uint8)
            weights[form.name] = cycle([form.view(each, DECODED) for each in raw])
    found = [{"format": name} for name in weights]
    for count in ROWS:
        x = torch.randn(count, DECODED[1]).bfloat16()
        multiply = lambda turn, x=x: int8_linear(x, next(turn), kernel="tiled")
        seconds = median_seconds({name: partial(multiply, turn) for name, turn in weights.items()})
        for row in found:
            row[f"rows_{count}"] = 2 * count * prod(DECODED) / seconds[row["format"]] / 1e12
    for row in found:
        row["of_q4_0"] = row["rows_128"] / next(each["rows_128"] for each in found if each["format"] == "Q4_0")
    return found


def attention() -> list[dict]:
    """G elements/s of K and V in the attention of one query per sequence over its cache."""
    linear.rates()  # otherwise the first job in bf16 would measure them
    found = []
    for batch, heads, group, dim, slots in CACHES:
        q = torch.randn(batch, heads * group, 1, dim)
        k, v = torch.randn(2, batch, heads, slots, dim)
        forms = {name: KVFormat.dense(getattr(torch, name)) for name in ("float32", "bfloat16")}
        forms |= {kind: cache_format(kind, torch.bfloat16, dim) for kind in COMPRESSED}
        jobs = {}
        for name, form in forms.items():
            dtype = torch.float32 if name == "float32" else torch.bfloat16
            stored = form.stored(k.to(dtype), v.to(dtype))
            jobs[name] = partial(cached_attention, q.to(dtype), *([x] for x in stored), None, form=form)
        rates = {name: 2 * k.numel() / seconds / 1e9 for name, seconds in median_seconds(jobs).items()}
        found.append({"cache": f"{batch}, {heads} x {group}, {dim}, {slots}", **rates})
    return found


def run(args: argparse.Namespace) -> None:
    prepare(torch.bfloat16)
    rows = [row for shape in SHAPES for row in matmuls(*shape)]
    result = origin(args) | {"threads": torch.get_num_threads(), "rows": rows, "decoding": decoding()}
    result["blocks"] = blocks() if takes_blocks() else []
    result["attention"] = attention()
    write_text("--output", args.output, to_json(rounded(result, 3)) + "\n")


def main() -> None:
    modules = ["bench.avx2", "bench.format_rates"] if "bench.avx2" in sys.orig_argv else ["bench.format_rates"]
    parser = Parser(f"python -m {' '.join(modules)}", "Time matmuls in int8, and the decoding of weights.")
    parser.add_argument("--output", required=True)
    sys.exit(execute(parser, run))


if __name__ == "__main__":
    main()
