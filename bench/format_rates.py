"""Rates of matmuls in int8 beside others, conversions included, of decoding quantised weights, and of attention over a
quantised cache.

python -m bench.format_rates --output docs/benchmarks/format_rates.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from h2o_flexgen.commands import options
from h2o_flexgen.evaluation.origin import origin
from h2o_flexgen.formats import GGUF, Int4, Int8, KVFormat
from h2o_flexgen.formats.forms import COMPRESSED, cache_format
from h2o_flexgen.kernels import linear
from h2o_flexgen.kernels.attention import cached_attention
from h2o_flexgen.kernels.int8 import UNPACKED, Int8Weight, can_pack, int8_linear, pack, prepare, takes_blocks
from h2o_flexgen.utils.files import rounded, to_json, write_text

#: (out, in) of the matrices; rows of activations; a few columns of these are far larger than the rest, as in a model
SHAPES, ROWS = ((16384, 4096), (4096, 16384), (8192, 2048), (2048, 8192)), (8, 32, 128, 512)
LARGE_COLUMNS, LARGE = 4, 50.0
#: formats of weights that are decoded, and the shape of the matrix
FORMATS, DECODED = (Int8(), Int4(64), GGUF["Q8_0"], GGUF["Q4_0"], GGUF["Q4_1"]), (4096, 4096)
#: sequences, KV heads, queries of each, head size, slots
CACHES = ((16, 8, 4, 64, 512), (16, 8, 4, 128, 1024), (8, 32, 1, 64, 205))
#: how often each job runs, of which the first warms up; one that has taken SECONDS does not run again
ROUNDS, SECONDS = 6, 3.0


def seconds_of(jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median of each, run in turn."""
    times = {name: [] for name in jobs}
    for _ in range(ROUNDS):
        for name, job in jobs.items():
            if sum(times[name]) < SECONDS:
                start = time.perf_counter()
                job()
                times[name].append(time.perf_counter() - start)
    return {name: median(each[1:] or each) for name, each in times.items()}


def matmuls(out: int, width: int) -> list[dict]:
    """TOP/s by rows."""
    codes, scale = torch.randint(-127, 128, (out, width), dtype=torch.int8), torch.rand(out)
    streamed, dense, found = Int8Weight(codes, scale), torch.randn(out, width), []
    packed, half = can_pack() and Int8Weight(pack(codes), scale), dense.bfloat16()
    fours = Int4(64).view(torch.empty(Int4(64).nbytes((out, width)), dtype=torch.uint8), (out, width))
    fours.format.encode(dense, fours.raw)
    for count in ROWS:
        x = torch.randn(count, width)
        x[:, :LARGE_COLUMNS] *= LARGE
        halves, eights = x.bfloat16(), torch.randint(-127, 128, (count, width), dtype=torch.int8)
        jobs = {
            "_int_mm": partial(torch._int_mm, eights, codes.t()),
            **{name: partial(int8_linear, halves, streamed, kernel=name) for name in UNPACKED},
            **({"packed": partial(int8_linear, halves, packed)} if packed else {}),
            **({"int4": partial(int8_linear, halves, fours)} if takes_blocks() else {}),
            "bf16": partial(torch.nn.functional.linear, halves, half),
            "fp32": partial(torch.nn.functional.linear, x, dense),
        }
        operations = 2 * count * out * width
        rates = {name: operations / seconds / 1e12 for name, seconds in seconds_of(jobs).items()}
        best = max(rates[name] for name in (*UNPACKED, "packed") if name in rates)
        found.append({"shape": f"{out} x {width}", "rows": count, "tops": rates, "of_int_mm": best / rates["_int_mm"]})
    return found


def decoding() -> list[dict]:
    """G elements/s by format."""
    weight, found = torch.randn(DECODED), []
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
        rates = {name: weight.numel() / seconds / 1e9 for name, seconds in seconds_of(jobs).items()}
        found.append({"format": each.name, **rates})
    return found


def attention() -> list[dict]:
    """Of one query a sequence over its cache, G elements of K and V a second."""
    linear.rates()  # else the first one in bf16 would measure them
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
        rates = {name: 2 * k.numel() / seconds / 1e9 for name, seconds in seconds_of(jobs).items()}
        found.append({"cache": f"{batch}, {heads} x {group}, {dim}, {slots}", **rates})
    return found


def run(args: argparse.Namespace) -> None:
    prepare(torch.bfloat16)
    rows = [row for shape in SHAPES for row in matmuls(*shape)]
    result = origin(args) | {"threads": torch.get_num_threads(), "rows": rows, "decoding": decoding()}
    result["attention"] = attention()
    write_text("--output", args.output, to_json(rounded(result, 3)) + "\n")


def make_parser() -> argparse.ArgumentParser:
    parser = options.Parser("python -m bench.format_rates", "Time matmuls in int8, and the decoding of weights.")
    parser.add_argument("--output", required=True)
    return parser


if __name__ == "__main__":
    sys.exit(options.main(make_parser(), run, None))
