"""Command line: a conversation or a text without end, over a KV cache of a fixed size.

h2o-flexgen stream --input-file turns.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict

from h2o_flexgen.commands import options
from h2o_flexgen.commands.generate import PASSED, SEARCHED
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.content import Content
from h2o_flexgen.policy import DEFAULT_RULE, GIB, KVBudget
from h2o_flexgen.utils.files import read_text, write_text

#: slots of the KV cache, if none are given: half for heavy hitters, half for recent tokens
SLOTS = 1024
#: tokens of an answer, at most
GEN_LEN = 256
#: tokens of a text over which a line of --plain averages
WINDOW = 4096
#: a turn for a model without a chat template, as in the H2O repository's demonstration
PLAIN_TURN = "USER: {}\n\nASSISTANT: "


def make_parser(prog: str = "python -m h2o_flexgen.commands.stream") -> argparse.ArgumentParser:
    parser = options.Parser(prog, "Go through turns or a text without end, over a KV cache of a fixed size.")
    add = parser.add_argument_group("model and machine").add_argument
    options.add_model_options(add)
    add("--path", help="folder of the weights, if it is not the model's")
    options.add_machine_options(add)
    options.add_cache_option(add)

    add = parser.add_argument_group("what is read; one of the first two").add_argument
    add("--input-file", help='JSON lines {"turns": [..]} or {"prompt": ..}: one conversation, never reset; - is stdin')
    add("--plain", metavar="FILE", help=f"a text to read only; prints perplexity, speed and memory by {WINDOW} tokens")
    add("--begin", type=int, default=0, help="of --plain, the first token to read (default: 0)")
    add("--tokens", type=options.count, help="of --plain, how many tokens to read (default: all)")
    add("--gen-len", type=options.count, help=f"the most tokens of an answer (default: {GEN_LEN})")
    options.add_template_option(add)
    add("--report", help="write the measurements to this file as JSON")

    add = parser.add_argument_group("KV cache").add_argument
    add("--hh-size", type=int, help=f"slots for heavy hitters (default: {SLOTS // 2})")
    add("--recent-size", type=int, help="slots for recent tokens (default: as --hh-size)")
    add("--kv-rule", metavar="NAME", help=f"the rule that says which tokens have the slots (default: {DEFAULT_RULE})")
    add("--full", action="store_true", help="a full cache, which ends with the model's positions")
    rolling = "positions count what the cache holds (default: on, but with --full)"
    add("--position-rolling", action=argparse.BooleanOptionalAction, help=rolling)
    add("--chunk", type=options.count, help="the most tokens that are read at once (default: 256)")

    options.add_policy_options(parser.add_argument_group("policy; what is not given is searched").add_argument)
    return parser


def read_turns(path: str) -> list[str]:
    """What the user says, turn by turn, all rows one after the other.

    Raises:
        UserError: the file cannot be read, has a row of another form, or no turn.
    """
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
            raise UserError(f"{options.option(name)} is of answers: leave it out, --plain only reads")
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

    arguments = {name: getattr(args, name) for name in (PASSED if policy else PASSED + SEARCHED)}
    how = {"position_rolling": args.position_rolling} | ({"chunk": args.chunk} if args.chunk else {})
    with LLM(policy=policy or "auto", **arguments) as llm:
        ids = None if args.plain is None else plain_ids(llm, args)
        with llm.session(budget, **how) as session:
            report = origin(args) | describe(llm, session, args.full)
            cache = options.describe_budget(report["kv_budget"])
            options.say(f"{llm.model.name}, {report['dtype']} on {report['device']}, KV cache: {cache}")
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
    return KVBudget.from_size(heavy, args.recent_size, args.kv_rule or DEFAULT_RULE)


def describe(llm, session, is_full: bool) -> dict:
    """What the report says of a session before it has done anything."""
    from h2o_flexgen.formats import dtype_name

    choice = session.choice
    found = {"model": llm.model.name, "model_revision": llm.model.revision}
    found |= {"device": str(llm.device), "dtype": dtype_name(llm.dtype)}
    found |= {"policy": asdict(choice.policy), "chunk": choice.workload.longest}
    found["kv_budget"] = None if is_full else choice.rule.to_dict()
    return found | {"planned_bytes": choice.plan.needed("ram" if choice.plan.shared else "gpu")}


def talk(llm, session, turns: list[str], gen_len: int, report: dict) -> None:
    """Let the model answer each turn, and print the answers as they come."""
    from h2o_flexgen.engine.params import SamplingParams

    params = SamplingParams(max_tokens=gen_len)
    rows = report.setdefault("turns", [])
    chats = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    for number, turn in enumerate(turns, 1):
        before = session.lengths()
        start = time.perf_counter()
        options.say(f"\n--- turn {number}, {before} tokens so far\nUSER: {turn}\n\nASSISTANT: ", end="")
        say = lambda _, piece: options.say(piece, end="")
        session.chat(turn, params, say) if chats else session.generate(PLAIN_TURN.format(turn), params, say)
        rows.append({"turn": number, "tokens": session.lengths(), **measured(session, before, start)})
        options.say("")
    options.say(f"\n{len(turns)} turns, {session.lengths()} tokens; {rate(rows[-1])} in the last turn")


def plain_ids(llm, args: argparse.Namespace) -> list[int]:
    """The tokens to read of the text of --plain."""
    ids = llm.model.encode(read_text(f"--plain {args.plain}", args.plain))
    if args.begin < 0 or args.begin + (args.tokens or 2) > len(ids):
        wanted = f"--begin {args.begin}" + (f" --tokens {args.tokens}" if args.tokens else "")
        raise UserError(f"--plain {args.plain} has {len(ids)} tokens, too few for {wanted}")
    return ids[args.begin : args.begin + args.tokens] if args.tokens else ids[args.begin :]


def read(session, ids: list[int], report: dict) -> None:
    """Read a text, and print a line for each window of it."""
    rows = report.setdefault("windows", [])
    options.say("    tokens  perplexity    speed and memory")
    for begin in range(0, len(ids), WINDOW):
        start = time.perf_counter()
        logprobs = session.feed(ids[begin : begin + WINDOW])
        row = {"tokens": session.lengths(), "scored": len(logprobs), "logprob": sum(logprobs)}
        row |= {"perplexity": perplexity([row])} | measured(session, begin, start)
        rows.append(row)
        options.say(f"{row['tokens']:>10}{row['perplexity']:>12.3f}    {rate(row)}")
    report["perplexity"] = perplexity(rows)
    options.say(f"perplexity {report['perplexity']:.3f}")


def perplexity(rows: list[dict]) -> float:
    scored = sum(row["scored"] for row in rows)
    return math.exp(-sum(row["logprob"] for row in rows) / scored) if scored else math.nan


def measured(session, before: int, start: float) -> dict:
    """Seconds per token since `start`, when the session had `before` tokens, and the memory that is held now."""
    from h2o_flexgen.machine import memory

    seconds = time.perf_counter() - start
    return {"seconds_per_token": seconds / (session.lengths() - before), "resident_bytes": memory.resident()}


def rate(row: dict) -> str:
    return f"{1e3 * row['seconds_per_token']:.2f} ms per token, {row['resident_bytes'] / GIB:.3f} GiB"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, as `options.main` says."""
    return options.main(make_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
