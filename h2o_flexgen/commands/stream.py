"""The command `stream`: a conversation or a text without end, over a KV cache of a fixed size."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict

from h2o_flexgen.commands import options
from h2o_flexgen.commands.generate import PASSED
from h2o_flexgen.commands.options import BUDGET, JOB, MACHINE
from h2o_flexgen.commands.output import describe_budget, print_text
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.content import Content
from h2o_flexgen.policy import GIB, SEARCHED, STREAM_RULE, KVBudget
from h2o_flexgen.utils.files import read_text, write_text

#: slots of the KV cache, if none are given: half for heavy hitters, half for recent tokens
SLOTS = 1024
#: the most tokens of an answer
GEN_LEN = 256
#: tokens of a text that a line of --plain averages over
WINDOW = 4096
#: a turn for a model without a chat template, as in the H2O repository's demonstration
PLAIN_TURN = "USER: {}\n\nASSISTANT: "


def make_parser(prog: str) -> options.Parser:
    parser = options.Parser(prog, "Answer turns, or read a text without end, over a KV cache of a fixed size.")
    options.add_model_options(parser)
    add = parser.add_argument
    add("--input-file", help='JSON lines {"turns": [..]} or {"prompt": ..}: one conversation, never reset; - is stdin')
    add("--plain", metavar="FILE", help=f"a text to read only; prints perplexity, speed and memory by {WINDOW} tokens")
    add("--gen-len", type=options.count, help=f"the most tokens of an answer (default: {GEN_LEN})")
    add("--hh-size", type=int, help=f"slots for heavy hitters (default: {SLOTS // 2})")
    add("--recent-size", type=int, help="slots for recent tokens (default: --hh-size)")
    options.add_machine_options(parser)
    options.add_cache_option(parser)
    add("--report", help="write the measurements to this file as JSON")

    add = parser.group(JOB)
    add("--begin", type=int, default=0, help="with --plain: the first token to read (default: 0)")
    add("--tokens", type=options.count, help="with --plain: how many tokens to read (default: all)")
    add("--chunk", type=options.count, help="the most tokens that are read at once (default: 256)")
    options.add_template_option(add)

    add = parser.group(BUDGET)
    rule = f"the rule that decides which tokens keep a slot (default: {STREAM_RULE})"
    add("--kv-rule", metavar="NAME", help=rule)
    add("--full", action="store_true", help="a full cache, which ends with the model's positions")
    rolling = "positions count the tokens in the cache (default: on, except with --full)"
    add("--position-rolling", action=argparse.BooleanOptionalAction, help=rolling)

    parser.group(MACHINE)("--path", help="folder of the weights, if it is not the model's")
    options.add_policy_options(parser)
    return parser


def read_turns(path: str) -> list[str]:
    """The user's turns, of all rows in order. Raises UserError if the file cannot be read, has a row of another form,
    or no turns."""
    turns = []
    for number, line in enumerate(Content(path), 1):
        if line.strip():
            try:
                row = json.loads(line)
                found = row["turns"] if "turns" in row else [row["prompt"]]
                if not isinstance(found, list) or not all(isinstance(turn, str) and turn for turn in found):
                    raise TypeError
            except (ValueError, TypeError, KeyError, RecursionError):
                form = '{"turns": ["text", ..]} or {"prompt": "text"}'
                raise UserError(f"--input-file {path}, line {number}: not JSON of the form {form}") from None
            turns += found
    if not turns:
        raise UserError(f"--input-file {path} holds no turns")
    return turns


def run(args: argparse.Namespace) -> None:
    if (args.input_file is None) == (args.plain is None):
        raise UserError("give one of --input-file, with turns, and --plain, a text")
    if args.plain is None and (args.begin or args.tokens):
        raise UserError("--begin and --tokens are for --plain")
    for name in ("gen_len", "chat_template_kwargs"):
        if args.plain is not None and getattr(args, name) is not None:
            raise UserError(f"{options.option(name)} is for answers: leave it out, --plain only reads")
    of_batches = ("gpu_batch_size", "num_gpu_batches", "prefill_tokens")
    if given := [options.option(name) for name in of_batches if getattr(args, name) is not None]:
        raise UserError(f"a stream is one sequence: leave {' and '.join(given)} out")
    if args.tokens == 1:
        raise UserError("--tokens must be 2 or more: the first token of a stream has no probability")
    if args.full and any(value is not None for value in (args.hh_size, args.recent_size, args.kv_rule)):
        raise UserError("--full keeps all tokens: leave --hh-size, --recent-size and --kv-rule out")
    options.check_files(args, reads=("input_file", "plain", "hardware"), writes=("report",))
    turns = read_turns(args.input_file) if args.plain is None else None
    budget = make_budget(args)
    policy = options.make_policy(args, 1)

    from h2o_flexgen.evaluation.origin import origin
    from h2o_flexgen.llm import LLM

    arguments = {name: getattr(args, name) for name in (PASSED if policy else [*PASSED, *SEARCHED])}
    session_options = {"position_rolling": args.position_rolling} | ({"chunk": args.chunk} if args.chunk else {})
    with LLM(policy=policy or "auto", **arguments) as llm:
        ids = None if args.plain is None else plain_ids(llm, args)
        with llm.session(budget, **session_options) as session:
            report = origin(args) | describe(llm, session, args.full)
            cache = describe_budget(report["kv_budget"])
            print_text(f"{llm.model.name}, {report['dtype']} on {report['device']}, KV cache: {cache}")
            try:
                if ids is None:
                    talk(llm, session, turns, args.gen_len or GEN_LEN, report)
                else:
                    read(session, ids, report)
            finally:
                if args.report is not None:
                    write_text("--report", args.report, json.dumps(report, indent=1) + "\n")


def make_budget(args: argparse.Namespace) -> KVBudget | None:
    if args.full:
        return None
    if args.kv_rule is not None:
        from h2o_flexgen.kv_cache import check_rule

        check_rule(args.kv_rule)
    heavy = SLOTS // 2 if args.hh_size is None else args.hh_size
    return KVBudget.from_size(heavy, args.recent_size, args.kv_rule or STREAM_RULE)


def describe(llm, session, is_full: bool) -> dict:
    """The report of a session before its first token."""
    from h2o_flexgen.formats import dtype_name
    from h2o_flexgen.machine.device import device_names

    choice = session.choice
    found = {"model": llm.model.name, "model_revision": llm.model.revision}
    found |= {"device": device_names(llm.devices), "dtype": dtype_name(llm.dtype)}
    found |= {"policy": asdict(choice.policy), "chunk": choice.workload.longest}
    found["kv_budget"] = None if is_full else choice.rule.to_dict()
    return found | {"planned_bytes": choice.plan.needed("ram" if choice.plan.shared else "gpu")}


def talk(llm, session, turns: list[str], gen_len: int, report: dict) -> None:
    """Let the model answer each turn, and print the answers as they are written."""
    from h2o_flexgen.engine.params import SamplingParams

    params = SamplingParams(max_tokens=gen_len)
    rows = report.setdefault("turns", [])
    chats = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    for number, turn in enumerate(turns, 1):
        before = session.lengths()
        start = time.perf_counter()
        print_text(f"\n--- turn {number}, {before} tokens so far\nUSER: {turn}\n\nASSISTANT: ", end="")
        print_piece = lambda _, piece: print_text(piece, end="")
        if chats:
            session.chat(turn, params, print_piece)
        else:
            session.generate(PLAIN_TURN.format(turn), params, print_piece)
        rows.append({"turn": number, "tokens": session.lengths(), **measured(session, before, start)})
        print_text("")
    print_text(f"\n{len(turns)} turns, {session.lengths()} tokens; {rate(rows[-1])} in the last turn")


def plain_ids(llm, args: argparse.Namespace) -> list[int]:
    """The tokens of --plain that are to be read."""
    ids = llm.model.encode(read_text(f"--plain {args.plain}", args.plain))
    if args.begin < 0 or args.begin + (args.tokens or 2) > len(ids):
        wanted = f"--begin {args.begin}" + (f" --tokens {args.tokens}" if args.tokens else "")
        raise UserError(f"--plain {args.plain} has {len(ids)} tokens, too few for {wanted}")
    return ids[args.begin : args.begin + args.tokens] if args.tokens else ids[args.begin :]


def read(session, ids: list[int], report: dict) -> None:
    """Read a text, and print a line for each window."""
    rows = report.setdefault("windows", [])
    print_text("    tokens  perplexity    speed and memory")
    for begin in range(0, len(ids), WINDOW):
        start = time.perf_counter()
        logprobs = session.feed(ids[begin : begin + WINDOW])
        row = {"tokens": session.lengths(), "scored": len(logprobs), "logprob": sum(logprobs)}
        row |= {"perplexity": perplexity([row])} | measured(session, begin, start)
        rows.append(row)
        print_text(f"{row['tokens']:>10}{row['perplexity']:>12.3f}    {rate(row)}")
    report["perplexity"] = perplexity(rows)
    print_text(f"perplexity {report['perplexity']:.3f}")


def perplexity(rows: list[dict]) -> float:
    scored = sum(row["scored"] for row in rows)
    return math.exp(-sum(row["logprob"] for row in rows) / scored) if scored else math.nan


def measured(session, before: int, start: float) -> dict:
    """Seconds per token since `start`, when the session had `before` tokens, and the RAM held now."""
    from h2o_flexgen.machine import memory

    seconds = time.perf_counter() - start
    return {"seconds_per_token": seconds / (session.lengths() - before), "resident_bytes": memory.resident()}


def rate(row: dict) -> str:
    return f"{1e3 * row['seconds_per_token']:.2f} ms per token, {row['resident_bytes'] / GIB:.3f} GiB"
