"""The command `quality`: what KV budgets cost in quality, measured on your own texts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from h2o_flexgen.commands import options
from h2o_flexgen.commands.options import JOB, LLM_OPTIONS, MACHINE
from h2o_flexgen.commands.output import print_text
from h2o_flexgen.errors import UserError
from h2o_flexgen.policy import DEFAULT_RULE, MIB
from h2o_flexgen.utils.files import rounded, to_json, write_text

#: packages whose versions are noted in the results of a task
MORE_PACKAGES = {"summarize": ("rouge", "rouge-score"), "compare": ("sacrebleu",)}


class Default(NamedTuple):
    """The defaults of a task's options."""

    gen_len: int | None  # None: set by the task
    rules: tuple[str, ...]
    ratios: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    windows: int = 8


TASKS = {
    "perplexity": Default(512, (DEFAULT_RULE, "sinks"), ratios=(0.1, 0.2, 0.4, 0.8)),
    "summarize": Default(128, (DEFAULT_RULE,), sizes=(64, 128, 256, 512, 1024)),
    "compare": Default(128, (DEFAULT_RULE, "recent"), ratios=(0.4,)),
    "needle": Default(None, (DEFAULT_RULE, "sinks"), ratios=(0.1, 0.2, 0.4), windows=20),
    "copy": Default(32, (DEFAULT_RULE, "sinks"), ratios=(0.1, 0.2, 0.4), windows=20),
    "choice": Default(32, (DEFAULT_RULE, "sinks"), ratios=(0.1, 0.2, 0.4), windows=20),
    "lengths": Default(128, (DEFAULT_RULE, "sinks"), ratios=(0.1, 0.2, 0.4)),
}
#: tasks that take no passages
WHOLE = ("summarize", "compare")

#: defaults of the passages and of sampled texts
PROMPT_LEN = 512
TEMPERATURE = 0.8


def make_parser(prog: str) -> options.Parser:
    parser = options.Parser(prog, "Measure what KV budgets cost in quality, on your own texts.", "[FILE ...]")
    add = parser.add_argument
    rows = 'JSON lines {"prompt", "completion"} or {"text"} in a file that ends in .jsonl'
    add("texts", nargs="*", metavar="FILE", help=f"texts, or {rows} (default: Python's language reference)")
    options.add_model_options(parser)
    rule = f"a cache rule; may be given several times (default: {DEFAULT_RULE}, and sinks or recent tokens beside it)"
    add("--kv-rule", action="append", metavar="NAME", help=rule)
    add("--ratios", type=float, nargs="+", metavar="R", help="KV budgets as fractions of the longest prompt")
    add("--sizes", type=int, nargs="+", metavar="N", help="KV budgets in slots")
    options.add_machine_options(parser)
    formats = "formats of the cache, each with each budget and the full cache (default: none, floats)"
    add("--compress-cache", nargs="+", choices=("none", "int8", "int4"), default=["none"], help=formats)
    add("-o", "--output", metavar="FILE", help="write the result as JSON, for generate --max-loss --quality FILE")
    add("--plot", metavar="FILE", help="draw bytes against loss into this PNG")

    add = parser.group(JOB)
    tasks = (
        "perplexity (default); needle: numbers hidden in passages; copy: passages repeated; choice: what follows a "
        "passage, of four pieces; lengths: of greedy answers; summarize: summaries of the rows' articles, by ROUGE"
    )
    add("--task", choices=[task for task in TASKS if task != "compare"], help=tasks)
    add("--compare", metavar="PROMPT", help="show what follows this text, or the text in this file, instead")
    add("--prompt-len", type=options.count, help=f"tokens of a passage that are its prompt (default: {PROMPT_LEN})")
    add("--gen-len", type=options.count, help="tokens behind it, at most (default: 512 of perplexity, else by task)")
    add("--windows", type=options.count, help="passages of a text, evenly spaced (default: up to 8, or by task)")
    add("--samples", type=int, default=0, help="for --compare: texts to draw for each setting, for self-BLEU")
    add("--temperature", type=options.amount, help=f"of those texts (default: {TEMPERATURE})")
    add("--hh-share", type=float, default=0.5, help="share of the slots for heavy hitters (default: 0.5)")

    parser.group(MACHINE)("--path", help="folder of the weights, if it is not the model's")
    return parser


def run(args: argparse.Namespace) -> None:
    if args.compare is not None:
        if args.task is not None:
            raise UserError("--compare is a task of its own: leave --task out")
        args.task = "compare"
    args.task = args.task or "perplexity"
    check(args)
    settings = settings_of(args)
    sources = sources_of(args)

    from h2o_flexgen.evaluation.origin import origin
    from h2o_flexgen.llm import LLM

    arguments = {name: getattr(args, name) for name in LLM_OPTIONS}
    with LLM(progress=False, **arguments) as llm:
        workload, rows = begin(args, llm, sources, settings)
        result = origin(args, MORE_PACKAGES.get(args.task, ())) | {"workload": workload, "rows": []}
        try:
            for row in rows:
                result["rows"].append(row)
        finally:  # what was measured before an interrupt or an error is kept
            if result["rows"]:
                finish(args, result)


def check(args: argparse.Namespace) -> None:
    """Raises UserError for options that contradict each other, unwritable files and missing packages."""
    if args.task == "compare" and args.texts:
        raise UserError("--compare brings its own text: leave the files out")
    if args.task == "summarize" and not args.texts:
        raise UserError('--task summarize needs a file of JSON lines {"article", "summary_gt"}')
    if args.plot is not None and args.task != "perplexity":
        raise UserError("--plot draws perplexities: leave it out here")
    if args.samples != 0 and (args.task != "compare" or args.samples < 2):
        raise UserError("--samples is for --compare, 2 or more")
    if args.task in WHOLE and not (args.prompt_len is None and args.windows is None):
        raise UserError("--prompt-len and --windows cut texts into passages: leave them out here")
    if args.gen_len is not None and TASKS[args.task].gen_len is None:
        raise UserError(f"--task {args.task} has answers of its own length: leave --gen-len out")
    if args.gen_len == 1:
        raise UserError("--gen-len must be 2 or more: with one token nothing is evicted")
    if args.temperature is not None and not args.samples:
        raise UserError("--temperature is for --samples: give them too")
    options.check_files(args, reads=("hardware",), writes=("output", "plot"), texts=args.texts)

    from h2o_flexgen.evaluation.extras import need

    if args.plot is not None:
        need("matplotlib", "matplotlib", "a plot")
    if args.task == "summarize":
        need("rouge", "rouge", "ROUGE")
        need("rouge_score.rouge_scorer", "rouge-score", "ROUGE")
    if args.samples:
        need("sacrebleu", "sacrebleu", "self-BLEU")


def settings_of(args: argparse.Namespace) -> list:
    """The settings to measure."""
    from h2o_flexgen.evaluation.settings import make_settings
    from h2o_flexgen.kv_cache import check_rule

    default = TASKS[args.task]
    args.gen_len = args.gen_len or default.gen_len
    args.prompt_len = args.prompt_len or PROMPT_LEN
    args.windows = args.windows or default.windows
    args.temperature = TEMPERATURE if args.temperature is None else args.temperature
    rules = args.kv_rule or default.rules
    for rule in rules:
        check_rule(rule)
    ratios = args.ratios or ()
    sizes = args.sizes or ()
    if not ratios and not sizes:
        ratios = default.ratios
        sizes = default.sizes
    formats = [None if kind == "none" else kind for kind in dict.fromkeys(args.compress_cache)]
    return make_settings(rules, ratios, sizes, args.hh_share, formats)


def sources_of(args: argparse.Namespace) -> list:
    """The contents of the files, or the text of --compare."""
    from h2o_flexgen.evaluation.passages import Source, builtin_source, read_source

    if args.task != "compare":
        return [read_source(path) for path in args.texts] or [builtin_source()]
    found = read_source(args.compare) if os.path.exists(args.compare) else Source("--compare", text=args.compare)
    if found.text is None:
        raise UserError("--compare takes one text: not JSON lines")
    return [found]


class Work(NamedTuple):
    """What is measured.

    Attributes:
        prompt_lens: of all texts.
        gen_len: tokens behind them, at most.
        errors: of rows that cannot be measured.
        measure: yields the results of settings.
        passages: how many there are.
    """

    prompt_lens: list[int]
    gen_len: int
    errors: list[str]
    measure: Callable[[list], Iterator[dict]]
    passages: int


def begin(args: argparse.Namespace, llm, sources: list, settings: list) -> tuple[dict, Iterator[dict]]:
    """The workload, and the rows of results, each as soon as it is measured. Raises UserError if nothing can be
    measured with this model and these texts."""
    from h2o_flexgen.evaluation.settings import allowed
    from h2o_flexgen.formats import dtype_name

    work = (whole_texts if args.task in WHOLE else passages)(args, llm, sources)
    count = len(settings)
    is_strict = args.kv_rule is not None
    settings = allowed(settings, max(work.prompt_lens), work.gen_len, llm.model.spec, is_strict)
    if len(settings) < count:
        print(
            f"{count - len(settings)} settings left out: fewer slots than the rule protects",
            file=sys.stderr,
        )
    if work.errors:
        print(f"{len(work.errors)} rows cannot be measured; {work.errors[0]}", file=sys.stderr)
    workload = {
        "task": args.task,
        "model": llm.model.name,
        "model_revision": llm.model.revision,
        "dtype": dtype_name(llm.dtype),
        "compress_weight": llm.model.compress_weight,
        "compute": llm.model.compute,
        "texts": [os.path.basename(source.name) for source in sources],
        "passages": work.passages,
        "prompt_len": max(work.prompt_lens),
        "gen_len": work.gen_len,
        "hh_share": args.hh_share,
    }
    return workload, work.measure(settings)


def whole_texts(args: argparse.Namespace, llm, sources: list) -> Work:
    """The text of --compare, or articles."""
    from h2o_flexgen.evaluation import compare, summaries

    if args.task == "compare":
        prompt = llm.admit(sources[0].text, args.gen_len)
        measure = lambda settings: compare.measure(llm, prompt, settings, args.gen_len, args.samples, args.temperature)
        return Work([len(prompt)], args.gen_len, [], measure, 1)
    articles, errors = gathered(summaries.articles_of(source, llm, args.gen_len) for source in sources)
    lengths = [len(article.prompt) for article in articles]
    measure = lambda settings: summaries.measure(llm, articles, settings)
    return Work(lengths, args.gen_len, errors, measure, len(articles))


def passages(args: argparse.Namespace, llm, sources: list) -> Work:
    """Passages of texts, and what a task asks about them."""
    from h2o_flexgen.evaluation import choice, copying, lengths, needle, perplexity, trials
    from h2o_flexgen.evaluation.passages import passages_of

    model = llm.model
    behind = {"perplexity": args.gen_len, "choice": choice.ANSWERS * (args.gen_len or 0)}.get(args.task, 1)
    cut = (passages_of(source, model, args.prompt_len, behind, args.windows) for source in sources)
    found, errors = gathered(cut)
    if args.task == "perplexity":
        measure = lambda settings: perplexity.measure(llm, found, settings)
        return Work([p.prompt_len for p in found], args.gen_len, errors, measure, len(found))
    if args.task == "lengths":
        make = lambda passage, index: lengths.requests_of(llm, passage, args.gen_len)
        items, more = gathered([trials.of_each(found, make)])
        measure = lambda settings: lengths.measure(llm, items, settings, args.gen_len)
        return Work([len(item.prompt) for item in items], args.gen_len, errors + more, measure, len(found) - len(more))
    makes = {
        "needle": lambda passage, index: needle.trials_of(model, passage, index),
        "copy": lambda passage, index: copying.trials_of(model, passage, index, args.gen_len),
        "choice": choice.trials_of,
    }
    judge = {"needle": needle.judge, "copy": copying.judge, "choice": choice.judge}[args.task]
    items, more = gathered([trials.of_each(found, makes[args.task])])
    fed = max(len(item.token_ids) - item.prompt_len for item in items)
    measure = lambda settings: trials.measure(llm, items, settings, judge)
    return Work([item.prompt_len for item in items], fed, errors + more, measure, len(found) - len(more))


def gathered(found: Iterator[tuple[list, list[str]]]) -> tuple[list, list[str]]:
    """Items and errors of all sources. Raises UserError if there are no items."""
    lists = list(found)
    items = [item for found_items, _ in lists for item in found_items]
    errors = [error for _, found_errors in lists for error in found_errors]
    if not items:
        raise UserError(f"none of the {len(errors)} rows can be measured; {errors[0]}")
    return items, errors


def finish(args: argparse.Namespace, result: dict) -> None:
    """Print the result, and write its files."""
    try:
        w = result["workload"]
        texts = f"{w['passages']} {'article' if args.task == 'summarize' else 'passage'}(s) of {', '.join(w['texts'])}"
        lengths = f"prompts of up to {w['prompt_len']} tokens, up to {w['gen_len']} behind each"
        print_text(f"{w['model']} in {w['dtype']}, {texts}: {lengths}\n")
        print_text(SHOW[args.task](result["rows"]))
    finally:
        if args.output is not None:
            write_text("--output", args.output, to_json(rounded(result)) + "\n")
        if args.plot is not None:
            from h2o_flexgen.evaluation.figure import draw

            draw(result, args.plot)


def table(header: list[str], lines: list[list[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*lines)]

    def aligned(line: list[str]) -> str:
        first, *others = zip(line, widths)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])

    return "\n".join(map(aligned, lines))


def budget_text(row: dict) -> list[str]:
    """The cells of BUDGET: rule and format, slots, slots over the longest prompt, and bytes."""
    nbytes = f"{row['kv_bytes'] / MIB:.2f} MiB"
    rule = row["rule"] + (f" {row['compress_cache']}" if row["compress_cache"] else "")
    if row["slots"] is None:
        return [rule, "all", "", nbytes]
    share = f"{row['hh_ratio'] + row['recent_ratio']:.3g}"
    return [rule, f"{row['heavy']} + {row['recent']}", share, nbytes]


#: the columns of `budget_text`
BUDGET = ["rule", "slots", "of the prompt", "KV cache of a sequence"]


def show_perplexity(rows: list[dict]) -> str:
    header = [*BUDGET, "perplexity", "rise", "agreement"]
    rises = [f"{r['rise']:+.1%} ± {r['error']:.1%}" for r in rows]
    numbers = [[f"{r['perplexity']:.2f}", rise, f"{r['agreement']:.1%}"] for r, rise in zip(rows, rises)]
    return table(header, [budget_text(row) + found for row, found in zip(rows, numbers)])


def show_summaries(rows: list[dict]) -> str:
    """ROUGE-1, 2 and L by both packages, against the references and against the summaries of the full cache."""
    names = [f"{package} {n}" for package in ("rouge", "rouge-score") for n in "12L"]
    lines = []
    for row in rows:
        for against, found in row["rouge"].items():
            if found is not None and not (against == "full_cache" and row is rows[0]):
                numbers = [f"{100 * found[package][n]:.1f}" for package in ("rouge", "rouge-score") for n in "12l"]
                lines.append([*budget_text(row), against.replace("_", " "), *numbers])
    return table([*BUDGET, "against", *names], lines)


def show_compared(rows: list[dict]) -> str:
    """The text of each setting under a line that names it."""
    parts = []
    for row in rows:
        rule, slots, _, nbytes = budget_text(row)
        line = f"--- {rule}, {slots} slots, {nbytes}"
        if row["self_bleu"] is not None:
            line += f", self-BLEU {row['self_bleu']:.2f} of {len(row['samples'])} samples"
        parts.append(f"{line}\n{row['text'].strip()}\n")
    return "\n".join(parts)


def show_scores(rows: list[dict]) -> str:
    """The mean of each score with its standard error."""
    header = [*BUDGET, *rows[0]["scores"]]
    lines = []
    for row in rows:
        lines.append(budget_text(row) + [f"{s['mean']:.1%} ± {s['error']:.1%}" for s in row["scores"].values()])
    return table(header, lines)


def show_lengths(rows: list[dict]) -> str:
    """The mean of each length, and its ratio to the full cache's with its standard error."""
    header = [*BUDGET, *rows[0]["scores"], "ended"]
    lines = []
    for row in rows:
        found = [f"{s['mean']:.1f}, {s['ratio']:.3f} ± {s['ratio_error']:.3f}" for s in row["scores"].values()]
        lines.append([*budget_text(row), *found, f"{row['ended']:.0%}"])
    return table(header, lines)


SHOW = {
    "perplexity": show_perplexity,
    "summarize": show_summaries,
    "compare": show_compared,
    "needle": show_scores,
    "copy": show_scores,
    "choice": show_scores,
    "lengths": show_lengths,
}
