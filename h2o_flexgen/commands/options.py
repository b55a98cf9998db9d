"""The parser of a command, and the options that several commands share."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.parts import journal_of
from h2o_flexgen.policy import GIB, Policy
from h2o_flexgen.utils.files import check_writable

#: what other programs call our options
FOREIGN = {"--max-tokens": "--gen-len", "--max-new-tokens": "--gen-len", "--output-len": "--gen-len"}
#: options that LLM takes under the same names
LLM_OPTIONS = (
    "model device dtype compress_weight compute path offload_dir mem gpu_mem cpu_mem disk_mem hardware".split()
)
#: groups of rarer options, in the order of the help
JOB = "job"
WORKERS = "several workers, on Ray"
BUDGET = "KV budget"
MACHINE = "model and machine"
PLACEMENT = "placement; what is not given is searched"


class Parser(argparse.ArgumentParser):
    """The parser of a command: options that most jobs need stand first in its help, rarer ones in groups behind them.

    Errors are UserErrors. `prog` is what the user typed to run the command; `words` are its positional arguments.
    """

    def __init__(self, prog: str, description: str, words: str = ""):
        usage = " ".join(["%(prog)s", *filter(None, [words]), "[options]"])
        super().__init__(prog=prog, usage=usage, description=description, allow_abbrev=False)
        self._groups = {title: self.add_argument_group(title) for title in (JOB, WORKERS, BUDGET, MACHINE, PLACEMENT)}

    def group(self, title: str) -> Callable[..., argparse.Action]:
        """The `add_argument` of a group of rarer options."""
        return self._groups[title].add_argument

    def parse_args(self, argv: list[str] | None = None, namespace: argparse.Namespace | None = None):
        args, unknown = self.parse_known_args(argv, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            is_option = word.startswith("-")
            problem = f"unknown option {word}" if is_option else f"unexpected {word!r}, which belongs to no option"
            known = {*self._option_string_actions, *FOREIGN} if is_option else ()
            self.error(problem + did_you_mean(word, sorted(known)))
        if getattr(args, "revision", None) is not None:
            from h2o_flexgen.models.repository import with_revision

            args.model = with_revision(args.model or getattr(args, "positional", None), args.revision)
        args.command = f"{self.prog} {shlex.join(sys.argv[1:] if argv is None else argv)}".strip()
        return args

    def error(self, message: str):
        """Raises UserError; a message about the value of an option ends with the option's help."""
        found = re.match(r"argument (-[^:/ ]+)", message)
        if found:
            message = f"{message.removeprefix('argument ')}; it means: {self._option_string_actions[found[1]].help}"
        raise UserError(f"{message} ({self.prog} --help lists the options)")

    def name_options(self, text: str) -> str:
        """A message of the library, in which arguments (`gpu_mem`) become the command's options (--gpu-mem)."""

        def named(found: re.Match) -> str:
            return option(found[1]) if option(found[1]) in self._option_string_actions else found[1]

        return re.sub("`([a-z_]+)`", named, text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the known word that is closest to it, if any is close."""
    close = difflib.get_close_matches(word, known, 1, 0.7)
    return f": did you mean {FOREIGN.get(close[0], close[0])}?" if close else ""


# types of values


def option(name: str) -> str:
    """The option for an argument: --gpu-mem for gpu_mem."""
    return f"--{name.replace('_', '-')}"


def count(text: str) -> int:
    """A whole number, 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return value


def amount(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


def gibibytes(text: str) -> int:
    """An amount in GiB, as bytes."""
    return int(min(amount(text) * GIB, 2.0**62))


def gibibytes_each(text: str) -> int | list[int]:
    """An amount in GiB, or several as "10,8", as bytes."""
    found = [gibibytes(part) for part in text.split(",")]
    return found[0] if len(found) == 1 else found


def json_object(text: str) -> dict:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return found


# shared options


def add_model_options(parser: Parser, note: str = "the demo model if left out", required: bool = False) -> None:
    """--model, whose help ends with `note`, and --revision, which becomes part of it."""
    names = "folder, GGUF file or Hugging Face name (NAME, NAME:Q4_K_M, NAME/FILE.gguf)"
    parser.add_argument("--model", required=required, help=f"{names}; {note}")
    add = parser.group(MACHINE)
    add("--revision", help="branch, tag or commit of a model on the hub; NAME@REVISION means the same")


def add_machine_options(parser: Parser, weights: tuple[str, ...] = ("int8", "int4")) -> None:
    """Memory limits, formats and devices. `weights`: the choices of --compress-weight."""
    add = parser.add_argument
    add("--mem", type=gibibytes, metavar="GIB", help="use at most this much RAM in all (default: all that is free)")
    compressed = "quantise the weights, once, into a copy in the user's cache folder"
    compressed += "; auto: whichever is fastest" * ("auto" in weights)
    add("--compress-weight", choices=weights, help=compressed)
    add("--compute", choices=("exact", "int8"), help="matmuls with weights in 8 and 4 bits (default: exact)")
    add = parser.group(MACHINE)
    several = "auto, cpu, cuda, cuda:N; several as cuda:0,cuda:1 hold a part of the layers each"
    add("--device", default="auto", help=several)
    add("--dtype", default="auto", help="auto (CUDA: fp16 or bf16; CPU: the fastest), float16, bfloat16, float32")
    add("--offload-dir", help="folder for data offloaded to disk (default: in the user's cache folder)")
    add("--disk-mem", type=gibibytes, metavar="GIB", help="use at most this much disk")
    add("--hardware", help="a profile by h2o-flexgen hardware (default: this machine, measured once)")
    add = parser.group(PLACEMENT)
    gpu = "use at most this much GPU memory (without CUDA: as --mem); of each of several devices, or as 10,8"
    add("--gpu-mem", type=gibibytes_each, metavar="GIB", help=gpu)
    cpu = "with CUDA or --percent: use at most this much RAM for the tier cpu"
    add("--cpu-mem", type=gibibytes, metavar="GIB", help=cpu)


def add_worker_options(parser: Parser) -> None:
    """How many workers share a job, and where they are."""
    add = parser.group(WORKERS)
    add("--workers", type=count, metavar="N", help="share the rows among N workers: a GPU or some cores each")
    add("--ray", metavar="ADDRESS", help="of the cluster whose machines have them; auto: the one of this machine")
    add("--worker-cpus", type=count, metavar="N", help="cores of each worker (default: even shares)")
    add("--worker-mem", type=gibibytes, metavar="GIB", help="RAM of each worker (default: even shares of what is free)")


def add_cache_option(parser: Parser) -> None:
    quantised = "keep K and V in 8 bits, or K in 8 and V in 4; auto: the fewest bits that make it faster"
    parser.add_argument("--compress-cache", choices=("int8", "int4", "auto"), help=quantised)


def add_template_option(add: Callable[..., argparse.Action]) -> None:
    """Variables of the chat template."""
    example = """'{"enable_thinking": false}'"""
    what = f"variables of the model's chat template, such as {example}; a row's own win"
    add("--chat-template-kwargs", type=json_object, metavar="JSON", help=what)


def add_policy_options(parser: Parser) -> None:
    """The policy, for `make_policy`; what is not given is searched."""
    add = parser.group(PLACEMENT)
    tiers = "percent of weights gpu cpu, cache gpu cpu, activations gpu cpu; the rest is on disk"
    add("--percent", nargs=6, type=float, metavar="P", help=f"no search, but six numbers: {tiers}")
    add("--gpu-batch-size", type=count, help="sequences per batch (with --percent by default up to 32)")
    add("--num-gpu-batches", type=count, help="batches per block (with --percent by default 1)")
    prefill = "tokens prefilled at once, at least one prompt (with --percent by default 2048)"
    add("--prefill-tokens", type=count, help=prefill)
    on_off = argparse.BooleanOptionalAction
    add("--overlap", action=on_off, help="move data while computing (default: on)")
    add("--cpu-cache-compute", action=on_off, help="with CUDA: attention on the CPU over KV blocks in RAM")
    add("--max-latency", type=amount, metavar="SECONDS", help="the longest that a row may take in the engine")


def add_length_option(add: Callable[..., argparse.Action]) -> None:
    what = "average length of the outputs, if they end early (default: learnt from finished rows)"
    add("--expect-len", type=amount, metavar="TOKENS", help=what)


def make_policy(args: argparse.Namespace, num_prompts: int | None) -> Policy | None:
    """The policy of --percent, if it is given."""
    if args.percent is None:
        return None
    if args.max_latency is not None:
        raise UserError("--percent contradicts --max-latency: give one of the two")
    size = args.gpu_batch_size or min(32, num_prompts or 4)
    on_cpu = bool(args.cpu_cache_compute)
    tokens = args.prefill_tokens or Policy.prefill_tokens
    return Policy(size, args.num_gpu_batches or 1, tuple(args.percent), args.overlap is not False, on_cpu, tokens)


def prompt_len(args: argparse.Namespace, positions: int, rolling: bool) -> int:
    """Tokens of a built-in prompt; unless positions are `rolling`, the output has to fit behind it."""
    return args.prompt_len or min(512, positions if rolling else max(1, positions - args.gen_len))


def num_prompts(args: argparse.Namespace, policy: Policy | str | None) -> int:
    """The number of built-in prompts of a job: one block, or 4 where the block is searched."""
    if isinstance(policy, Policy):
        return args.num_prompts or policy.block_size
    return args.num_prompts or (args.gpu_batch_size or 4) * (args.num_gpu_batches or 1)


# files


def check_files(
    args: argparse.Namespace, reads: tuple[str, ...], writes: tuple[str, ...], texts: Iterable[str | None] = ()
) -> None:
    """Raises UserError for options that name a file that cannot be written, or the same file: the second to be written
    would destroy the first. `texts`: files among the positional arguments."""
    seen = {os.path.realpath(path): path for path in texts if path is not None}
    for name in reads + writes:
        given = getattr(args, name)
        if given is None or (given == "-" and name in reads):
            continue
        final = os.path.realpath(given)
        given = journal_of(given) if name == "output_file" else given
        path = os.path.realpath(given)
        for each in {final, path}:
            if each in seen:
                raise UserError(f"{seen[each]} and {option(name)} name the same file: {each}")
        folder = os.path.dirname(path)
        if name in writes and folder in seen:
            raise UserError(f"{option(name)} is in the folder of {seen[folder]}, of which it would be a part: {folder}")
        seen |= {final: option(name), path: option(name)}
        if name == "output_file":
            seen[f"{path}.manifest.json"] = "the manifest of --output-file"
        if name in writes:
            check_writable(option(name), given)
