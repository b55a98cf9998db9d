"""What the commands share: options, what they print, and how they end."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable

from h2o_flexgen.errors import UserError
from h2o_flexgen.planning.budget import MIN_HH_RATIO, BudgetPoint, largest_free
from h2o_flexgen.planning.losses import Losses
from h2o_flexgen.policy import DEFAULT_RULE, GIB, KVBudget, Policy
from h2o_flexgen.utils import interrupts
from h2o_flexgen.utils.files import check_writable

#: what other programs call our options
FOREIGN = {"--max-tokens": "--gen-len", "--max-new-tokens": "--gen-len", "--output-len": "--gen-len"}

#: what torch says where the RAM is full
TORCH_OUT_OF_MEMORY = "can't allocate memory"


class Parser(argparse.ArgumentParser):
    """Of a command; `prog`: what the user typed to run it. Errors are the user's, and end as all of those do."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse_args(self, argv: list[str] | None = None, namespace: argparse.Namespace | None = None):
        args, unknown = self.parse_known_args(argv, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            is_option = word.startswith("-")
            what = f"unknown option {word}" if is_option else f"unexpected {word!r}, which belongs to no option"
            known = {*self._option_string_actions, *FOREIGN} if is_option else ()
            self.error(what + did_you_mean(word, sorted(known)))
        if getattr(args, "revision", None) is not None:
            from h2o_flexgen.models.repository import with_revision

            args.model = with_revision(args.model or getattr(args, "positional", None), args.revision)
        args.command = f"{self.prog} {shlex.join(sys.argv[1:] if argv is None else argv)}".strip()
        return args

    def error(self, message: str):
        """Raises UserError; what is said of an option's value ends in what the option is."""
        found = re.match(r"argument (-[^:/ ]+)", message)
        if found:
            message = f"{message.removeprefix('argument ')}; it means: {self._option_string_actions[found[1]].help}"
        raise UserError(f"{message} ({self.prog} --help lists the options)")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """For the end of a message about a word that is not known: the nearest that is, if any is near."""
    near = difflib.get_close_matches(word, known, 1, 0.7)
    return f": did you mean {FOREIGN.get(near[0], near[0])}?" if near else ""


# options


def option(name: str) -> str:
    """The option of an argument: --gpu-mem of gpu_mem."""
    return f"--{name.replace('_', '-')}"


def count(text: str) -> int:
    """The value of an option that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return value


def amount(text: str) -> float:
    """The value of an option that measures something."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


def gibibytes(text: str) -> int:
    """The value of an option in GiB, in bytes."""
    return int(amount(text) * GIB)


def add_model_options(add, note: str = "the demo model if left out", required: bool = False) -> None:
    """--model, whose help ends with `note`, and --revision, which becomes a part of it."""
    names = "folder, GGUF file or Hugging Face name (NAME, NAME:Q4_K_M, NAME/FILE.gguf)"
    add("--model", required=required, help=f"{names}; {note}")
    add("--revision", help="a branch, tag or commit of the model on the hub, as NAME@REVISION says it too")


def add_machine_options(add, weights: tuple[str, ...] = ("int8", "int4")) -> None:
    """In which types and where a job runs, and what it may use of each tier; `add` is a group's `add_argument`.
    `weights`: what --compress-weight may be."""
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--dtype", default="auto", help="auto (CUDA: fp16 or bf16; CPU: the fastest), float16, bfloat16, float32")
    compressed = "quantise the weights, once, into a copy under the user's cache folder"
    compressed += "; auto: as is fastest" * ("auto" in weights)
    add("--compress-weight", choices=weights, help=compressed)
    add("--compute", choices=("exact", "int8"), help="matmuls of weights in 8 and 4 bits (default: exact)")
    add("--offload-dir", help="folder for what is offloaded to disk (default: under the user's cache folder)")
    add("--gpu-mem", type=gibibytes, metavar="GIB", help="use at most this much device memory (RAM without CUDA)")
    add("--cpu-mem", type=gibibytes, metavar="GIB", help="use at most this much RAM for the cpu tier, with CUDA")
    add("--disk-mem", type=gibibytes, metavar="GIB", help="use at most this much disk")
    add("--hardware", help="a profile by h2o-flexgen hardware (default: this machine, measured once)")


def add_cache_option(add) -> None:
    """The format of the KV cache."""
    quantised = "keep K and V in 8 bits, or K in 8 and V in 4; auto: in as few as make it faster"
    add("--compress-cache", choices=("int8", "int4", "auto"), help=quantised)


def add_template_option(add) -> None:
    """Variables of the chat template."""

    def variables(text: str) -> dict:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
        return found

    example = """'{"enable_thinking": false}'"""
    what = f"variables of the model's chat template, such as {example}; those of a row win"
    add("--chat-template-kwargs", type=variables, metavar="JSON", help=what)


def add_policy_options(add) -> None:
    """The policy; what is not given is searched. `make_policy` reads them."""
    tiers = "percent of weights gpu cpu, cache gpu cpu, activations gpu cpu; the rest is on disk"
    add("--percent", nargs=6, type=float, metavar="P", help=f"no search, but six numbers: {tiers}")
    add("--gpu-batch-size", type=count, help="sequences per batch (with --percent by default up to 32)")
    add("--num-gpu-batches", type=count, help="batches per block (with --percent by default 1)")
    add("--prefill-tokens", type=count, help="of prefill at once, at least a prompt (with --percent by default 2048)")
    on_off = argparse.BooleanOptionalAction
    add("--overlap", action=on_off, help="move data while computing (default: on)")
    add("--cpu-cache-compute", action=on_off, help="attention on the CPU for KV blocks in its RAM")
    add("--max-latency", type=amount, metavar="SECONDS", help="the most that a row may take in the engine")


def add_length_option(add) -> None:
    """What is known of outputs that may end early."""
    add("--expect-len", type=amount, metavar="TOKENS", help="of the average output (default: as the rows so far)")


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
    """Tokens of a built-in prompt, for a model whose `positions` have to hold the output too, unless they are
    `rolling`."""
    return args.prompt_len or min(512, positions if rolling else max(1, positions - args.gen_len))


def num_prompts(args: argparse.Namespace, policy: Policy | str | None) -> int:
    """How many built-in prompts a job has: one block, or 4 where the block is searched."""
    if isinstance(policy, Policy):
        return args.num_prompts or policy.block_size
    return args.num_prompts or (args.gpu_batch_size or 4) * (args.num_gpu_batches or 1)


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """The options that `make_losses` and `make_budget` read."""

    def ratio(text: str) -> float | str:
        return text if text == "auto" else float(text)

    add = parser.add_argument_group("KV budget; without these the cache is full").add_argument
    heavy = "heavy hitters as a fraction of the longest prompt (default: 0); auto: as many as cost no throughput"
    add("--hh-ratio", type=ratio, help=heavy)
    add("--recent-ratio", type=float, help="recent tokens, likewise (default: as --hh-ratio)")
    add("--hh-size", type=int, help="heavy hitters in slots")
    add("--recent-size", type=int, help="recent tokens in slots (default: as --hh-size)")
    loss = "the cheapest rule and budget of --quality that cost at most this: 0.02 is 2 %% more perplexity"
    add("--max-loss", type=float, metavar="LOSS", help=f"{loss}; with --hh-ratio auto a limit of what that takes")
    add("--quality", metavar="FILE", help="what budgets cost, by h2o-flexgen quality --output FILE")
    add("--min-hh-ratio", type=amount, help=f"for auto: the floor (default: {MIN_HH_RATIO})")
    rule = f"the rule that says which tokens have the slots, with options NAME:first=4 (default: {DEFAULT_RULE})"
    add("--kv-rule", metavar="NAME", help=rule)
    rolling = "positions count what the cache holds, and outputs may be longer than the model's context (RoPE only)"
    add("--position-rolling", action="store_true", help=rolling)


def make_losses(args: argparse.Namespace) -> Losses | None:
    """What budgets cost, and how much of that is accepted; None without --quality."""
    if args.quality is None:
        if args.max_loss is not None:
            raise UserError("--max-loss needs to know what budgets cost: give a --quality FILE too")
        return None
    if args.max_loss is None and args.hh_ratio != "auto":
        raise UserError("--quality is for --max-loss and for --hh-ratio auto: give one of them too")
    return Losses.from_file(args.quality, args.max_loss)


def check_model(losses: Losses | None, kv_rule: str | None, model: str, weights: str) -> None:
    """Warn if losses, or those of the layers of a rule, were measured with another model than that of the job, with
    other weights and matmuls (`losses.weights_text`), or with another rule."""
    if losses is not None:
        for measured, used in (losses.model, model), (losses.weights, weights):
            if measured != used:
                print(f"warning: --quality {losses.path} is of {measured}, this job is of {used}", file=sys.stderr)
    if kv_rule is not None:
        from h2o_flexgen.kv_cache import layer_losses

        layers = layer_losses(kv_rule)
        name = kv_rule.partition(":")[0]
        if layers is not None and layers.model not in (None, model):
            print(f"warning: the layers of --kv-rule are of {layers.model}, this job is of {model}", file=sys.stderr)
        if layers is not None and layers.rule and layers.rule.partition(":")[0] != name:
            print(f"warning: the layers of --kv-rule are of {layers.rule}, this job has {name}", file=sys.stderr)


def make_budget(args: argparse.Namespace, losses: Losses | None = None) -> KVBudget | str | None:
    """The KV budget, "auto", or None for a full cache. One that is chosen for its loss is told on stderr, and the
    format of the cache that belongs to it becomes that of `args`."""
    if args.kv_rule is not None:
        from h2o_flexgen.kv_cache import check_rule

        check_rule(args.kv_rule)
    given = (args.hh_ratio, args.recent_ratio, args.hh_size, args.recent_size)
    if args.position_rolling and (args.hh_ratio == "auto" or losses is not None):
        raise UserError(
            "--position-rolling needs a KV budget in numbers: --hh-ratio auto may take the full cache, which cannot "
            "roll, and --quality has been measured without"
        )
    if args.hh_ratio == "auto":
        if any(value is not None for value in given[1:]):
            raise UserError("--hh-ratio auto sizes the whole KV budget: leave --recent-ratio and the sizes out")
        if args.kv_rule not in (None, DEFAULT_RULE):
            raise UserError(f"--hh-ratio auto is for --kv-rule {DEFAULT_RULE}: with another rule give a number")
        return "auto"
    if args.min_hh_ratio is not None:
        raise UserError("--min-hh-ratio is the floor of --hh-ratio auto")
    if losses is not None:
        if args.kv_rule is not None or any(value is not None for value in given):
            raise UserError("--max-loss chooses the rule and the budget: leave --kv-rule, ratios and sizes out")
        found = losses.cheapest(args.compress_cache)
        args.compress_cache = found.compress_cache
        print(f"KV budget  {found}: the cheapest of {losses.path} within {losses.max_loss:.3g}", file=sys.stderr)
        return found.kv_budget
    if any(value is not None for value in given):
        return KVBudget(*given, args.kv_rule or DEFAULT_RULE, args.position_rolling)
    if args.position_rolling:
        raise UserError("--position-rolling needs a KV budget: a full cache ends with the model's positions")
    if args.kv_rule is not None:
        raise UserError("--kv-rule says which tokens a KV budget keeps: give one too, such as --hh-ratio 0.2")
    return None


def check_files(args: argparse.Namespace, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
    """Raises UserError for options that name a file that cannot be written, or the same file: the second to be written
    would destroy the first."""
    seen = {}
    for name in reads + writes:
        given = getattr(args, name)
        if given is None or (given == "-" and name in reads):
            continue
        path = os.path.realpath(given)
        if path in seen:
            raise UserError(f"{seen[path]} and {option(name)} name the same file: {path}")
        seen[path] = option(name)
        if name == "output_file":
            seen[f"{path}.manifest.json"] = "the manifest of --output-file"
        if name in writes:
            check_writable(option(name), given)


def check_not_written(args: argparse.Namespace, reads: Iterable[str], writes: tuple[str, ...]) -> None:
    """Raises UserError for a file that is read, without an option, and written by one."""
    written = {os.path.realpath(getattr(args, name)) for name in writes if getattr(args, name) is not None}
    for path in reads:
        if os.path.realpath(path) in written:
            raise UserError(f"{path} would be read and written")


# output


def name_at(model: str, revision: str | None) -> str:
    """A model and its commit on the hub, for people."""
    return f"{model} (revision {revision[:12]})" if revision else model


def describe_job(
    model: str,
    dtype: str,
    machine: str,
    workload: dict,
    policy: Policy,
    kv_budget: dict | None,
    compress_cache: str | None = None,
) -> str:
    """What a job is, for people.

    Args:
        workload: num_prompts, prompt_len and gen_len.
        kv_budget: slots, "heavy" and "recent", and "rule"; None for a full cache.
        compress_cache: int8, int4 or None.
    """
    prompts = f"{workload['num_prompts']} prompts of up to {workload['prompt_len']} tokens"
    percent = " ".join(f"{x:g}" for x in policy.percent)
    cache = describe_budget(kv_budget) + (f", in {compress_cache}" if compress_cache else "")
    switches = f"overlap {'on' if policy.overlap else 'off'}"
    if policy.cpu_cache_compute:
        switches += ", attention on the CPU"
    if policy.prefill_tokens != Policy.prefill_tokens:
        switches += f", prefill by {policy.prefill_tokens} tokens"
    return (
        f"model      {model}, {dtype} on {machine}\n"
        f"workload   {prompts}, {workload['gen_len']} tokens each\n"
        f"policy     {policy.gpu_batch_size} x {policy.num_gpu_batches}, percent {percent}, {switches}\n"
        f"KV cache   {cache}"
    )


def describe_budget(kv_budget: dict | None) -> str:
    """A KV budget as reports have it, None for a full cache, for people."""
    if kv_budget is None:
        return "full"
    rolling = ", positions roll" if kv_budget.get("position_rolling") else ""
    return f"{kv_budget['heavy']} heavy + {kv_budget['recent']} recent slots ({kv_budget['rule']}){rolling}"


def describe_curve(curve: list[BudgetPoint]) -> str:
    """A table for people: formats of weights and cache where there are several, KV budget, block, tokens per second,
    how many times those of the largest budget in the formats with most bits, and the loss where one is known. An arrow
    marks the one that `largest_free` takes."""
    chosen = largest_free(curve)
    formats = [(point.compress_weight, point.compress_cache) for point in curve]
    dearest = [point for point, each in zip(curve, formats) if each == formats[0]][-1]
    has_losses = any(point.loss is not None for point in curve)
    has_weights, has_caches = (len(set(each)) > 1 for each in zip(*formats))
    head = "  weights" * has_weights + "   cache" * has_caches
    lines = [f"  {head} hh-ratio  slots       block  tokens/s    gain" + "      loss" * has_losses]
    for point in curve:
        mark = "=>" if point == chosen else "  "
        ratio = "full" if point.ratio is None else f"{point.ratio:g}"
        block = f"{point.gpu_batch_size} x {point.num_gpu_batches}"
        loss = "unknown" if point.loss is None else f"{point.loss:+.1%}"
        form = f"{point.compress_weight or 'stored':>9}" * has_weights
        form += f"{point.compress_cache or 'floats':>8}" * has_caches
        gain = f"{point.tokens_per_s / dearest.tokens_per_s:.2f}x"
        lines.append(f"{mark}{form}{ratio:>9}{point.slots:>7}{block:>12}{point.tokens_per_s:>10.2f}{gain:>8}")
        lines[-1] += f"{loss:>10}" * has_losses
    return "\n".join(lines)


def say(text: str, end: str = "\n") -> None:
    """A text to stdout, at once."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as e:
        _discard(sys.stdout)
        raise UserError(f"cannot write to stdout: {e.strerror}") from None


def _discard(stream) -> None:
    """What is buffered would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def name_options(text: str, parser: argparse.ArgumentParser) -> str:
    """A message of the library with its arguments (`gpu_mem`) under the names of the parser's options (--gpu-mem)."""
    known = parser.format_help()

    def named(found: re.Match) -> str:
        return option(found[1]) if option(found[1]) in known else found[1]

    return re.sub("`([a-z_]+)`", named, text)


def main(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: list[str] | None) -> int:
    """Run a command to its end; returns the exit code: 0, 2 for an error of the user, 128 + the signal."""
    interrupts.take_over()
    for stream in (sys.stdout, sys.stderr):  # cron and old locales: what they cannot show must not end a job
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
    logging.getLogger("h2o_flexgen").addHandler(logging.lastResort)  # plain warnings on stderr; added once
    try:
        run(parser.parse_args(argv))
    except UserError as e:
        print(f"error: {name_options(' '.join(str(e).split()), parser)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print(": ".join(["interrupted", *getattr(e, "__notes__", [])]), file=sys.stderr)
        return 128 + getattr(e, "signum", signal.SIGINT)
    except BrokenPipeError:  # who read the output has gone: end quietly, as other programs do
        _discard(sys.stdout)
        _discard(sys.stderr)
        return 128 + signal.SIGPIPE
    except (MemoryError, RuntimeError) as e:
        if not (isinstance(e, MemoryError) or TORCH_OUT_OF_MEMORY in str(e)):
            raise
        advice = "end other programs, or take a smaller model, shorter texts or smaller batches"
        print(f"error: out of memory: {advice}", file=sys.stderr)
        return 2
    return 0
