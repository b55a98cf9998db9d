"""The perplexity of the demo model in the types of GGUF files that people download: ours, transformers' on the package
gguf's decoding, and llama.cpp's.

    bash bench/llama_cpp.sh FOLDER        # with TARGETS="llama-quantize llama-perplexity"
    python -m bench.file_formats

The demo model's width is no multiple of 256, which K-quants need: its hidden states are padded with zeros to 768, its
heads with heads of zeros, and the norms' weights and epsilon are scaled so that it computes what it did. llama.cpp
quantises the padded model. All score the second half of windows of 512 tokens of Python's help texts. Results go to
docs/benchmarks/file_formats.json.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
from datetime import date
from math import exp
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean

import gguf
import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from bench import common
from bench.checkpoint import checkpoint
from bench.rows import DEMO, DEMO_KIND
from h2o_flexgen import LLM
from h2o_flexgen.models.gguf_file import read_model

FILE = "file_formats"
TYPES = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q3_K_M", "Q2_K", "IQ4_XS", "IQ4_NL", "Q4_0")
#: sizes of the demo model's matrices that are padded, and to what: its width and that of its keys
WIDTHS = {576: 768, 192: 256}
HEADS = {"attention.head_count": 12, "attention.head_count_kv": 4, "embedding_length": 768}
#: the mean of squares is over as many more elements
SHARE = 576 / 768
WINDOW = 512
WINDOWS = 8
#: the first token of a window that is scored: llama-perplexity's
FIRST = WINDOW // 2 + 1


def padded(source: Path, target: Path) -> Path:
    """Write the demo model with wider hidden states, which compute the same, in fp32."""
    reader = GGUFReader(source)
    arch = reader.get_field("general.architecture").contents()
    changes = {f"{arch}.{name}": size for name, size in HEADS.items()} | {"general.file_type": 0}
    eps = f"{arch}.attention.layer_norm_rms_epsilon"
    changes[eps] = SHARE * reader.get_field(eps).contents()
    writer = GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", *changes):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for name, value in changes.items():
        kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
        writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if data.ndim == 1:
            data = data * np.float32(SHARE**0.5)
        missing = [(0, WIDTHS.get(size, size) - size) for size in data.shape]
        writer.add_tensor(tensor.name, np.pad(data, missing))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def windows(tokens: list[int]) -> list[list[int]]:
    return [tokens[at : at + WINDOW] for at in range(0, WINDOWS * WINDOW, WINDOW)]


def ours(path: Path, texts: list[list[int]], compute: str) -> float:
    with LLM(str(path), device="cpu", dtype="float32", compute=compute, progress=False) as llm:
        scores = llm.score(texts, first_scored=FIRST)
    return exp(-fmean(logprob for score in scores for logprob in score.token_logprobs))


@torch.inference_mode()
def by_transformers(path: Path, texts: list[list[int]]) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    found = []
    for text in texts:
        logprobs = torch.log_softmax(model(torch.tensor([text])).logits[0].double(), -1)
        found += [float(logprobs[n - 1, text[n]]) for n in range(FIRST, WINDOW)]
    return exp(-fmean(found))


def by_llama_cpp(programs: Path, path: Path, text: Path) -> float:
    argv = [programs / "llama-perplexity", "-m", path, "-f", text, "-c", WINDOW, "-b", WINDOW, "--chunks", WINDOWS]
    done = subprocess.run([*map(str, argv)], check=True, capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    if found is None:
        sys.exit(f"no perplexity in the output of llama-perplexity: {done.stderr[-500:]}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help=f"(default: {' '.join(TYPES)})")
    args = parser.parse_args()
    programs = common.data_folder() / "llama_cpp" / "build" / "bin"
    with common.scratch() as folder:
        text = folder / "text.txt"
        text.write_text("\n\n".join(topics[name] for name in sorted(topics))[: 6 * WINDOW * WINDOWS])
        whole = padded(checkpoint(DEMO, DEMO_KIND, "bfloat16", common.data_folder()), folder / "F32.gguf")
        with LLM(str(whole), device="cpu", dtype="float32", progress=False) as llm:
            texts = windows(llm.tokenizer(text.read_text())["input_ids"])
        for kind in args.types or TYPES:
            path = folder / f"{kind}.gguf"
            quantise = [programs / "llama-quantize", whole, path, kind]
            subprocess.run([*map(str, quantise)], check=True, capture_output=True)
            names = {tensor.type for tensor in read_model(path).tensors.values() if len(tensor.shape) > 1}
            row = {
                "file": kind,
                "types": ", ".join(sorted(names)),
                "mib": path.stat().st_size / 2**20,
                "exact": ours(path, texts, "exact"),
                "transformers": by_transformers(path, texts),
                "int8": ours(path, texts, "int8"),
                "llama_cpp": by_llama_cpp(programs, path, text),
            }
            row |= {"date": date.today().isoformat(), "commit": common.commit()}
            print(row, flush=True)
            common.add_entry(
                FILE,
                "rows",
                row,
                ("file",),
                lambda each: TYPES.index(each["file"]),
                {"python": platform.python_version()},
            )
            path.unlink()


if __name__ == "__main__":
    main()
