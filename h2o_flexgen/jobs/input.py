"""Rows of a job: from an input file, JSON lines with a prompt each, or built in."""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from h2o_flexgen.engine.messages import Conversation
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs import openai, tasks
from h2o_flexgen.jobs.content import check_no_table
from h2o_flexgen.jobs.keys import RowError, sampling
from h2o_flexgen.jobs.parts import open_content
from h2o_flexgen.utils.texts import builtin_text

#: digests as bytes
DIGEST = np.dtype(">u8")


@dataclass
class Row:
    """One prompt of a job.

    Attributes:
        index: place among the rows.
        line: number of its line in the input file, from 1.
        digest: of the content of the line.
        custom_id: the user's own, unique name for it.
        prompt: a text, token ids or a conversation, or the UserError that says why the row has none.
        params: the `SamplingParams` that it sets.
        kind: the form of its output: "plain", OpenAI's "chat", "completion" or "embedding", or our "score".
        model: the model's name in an OpenAI line.
        logprobs: whether its output has the log-probabilities of its tokens.
        task: what is wanted in place of a continuation.
    """

    index: int
    line: int
    digest: str
    custom_id: str | None = None
    prompt: str | list[int] | Conversation | UserError = ""
    params: dict = field(default_factory=dict)
    kind: str = "plain"
    model: str | None = None
    logprobs: bool = False
    task: tasks.Embed | tasks.Score | None = None

    @property
    def id(self) -> str | int:
        """Identifies the row from one run of a job to the next."""
        return self.index if self.custom_id is None else self.custom_id

    def set_logprobs(self, wanted: dict) -> None:
        """`wanted`: from `openai.wanted_logprobs`."""
        self.logprobs = bool(wanted)
        self.params |= wanted

    @property
    def key(self) -> int:
        """Selects the random numbers: independent of its place for a row with a custom_id."""
        if self.custom_id is None:
            return self.index
        return int(_digest(self.custom_id.encode("utf-8", "surrogatepass"))[:15], 16)


class Rows:
    """The rows of a job, in the order of their lines. Each loop over them reads the lines again; only 16 bytes of each
    row are kept.

    Args:
        name: of the rows in messages.
        lines: the same in each loop: one row each, except blank ones.
        parse: (line, index of its row, its number) -> row.
        before: `known` of an earlier run: lines that are the same, in the same places, are not parsed again.

    Attributes:
        known: (N, 2) uint64, which identify each row from one run of a job to the next: `id_hash` of its id, and its
            digest.
        has_objects: whether some lines are JSON objects.

    Raises:
        UserError: two rows have the same custom_id; or, in a loop, the lines have changed.
    """

    def __init__(
        self,
        name: str,
        lines: Iterable[bytes],
        parse: Callable[[bytes, int, int], Row],
        before: np.ndarray | None = None,
    ):
        self.name = name
        self.lines = lines
        self.parse = parse
        self.has_objects = before is not None  # it was a job's input
        self.known = self._read(np.empty((0, 2), np.uint64) if before is None else before)
        self._check_ids()

    def _read(self, before: np.ndarray) -> np.ndarray:
        """`known`, of all lines."""
        known = array("Q", before.tobytes())
        old = before[:, 1].astype(DIGEST).tobytes()
        index = -1
        for index, (number, line) in enumerate(self._numbered()):
            if _hash_bytes(line) == old[8 * index : 8 * index + 8]:
                continue
            row = self.parse(line, index, number)
            known[2 * index : 2 * index + 2] = array("Q", (id_hash(row.id), int(row.digest, 16)))
            self.has_objects |= not isinstance(row.prompt, NotAnObject)
        return np.array(known[: 2 * index + 2], np.uint64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.known)

    def __iter__(self) -> Iterator[Row]:
        return self.those(np.ones(len(self), bool))

    def those(self, wanted: np.ndarray) -> Iterator[Row]:
        """The rows for which `wanted`, (N,) bool, is true."""
        index = -1
        each = zip(wanted.tolist(), self._numbered())  # ignores lines that were appended
        for index, (is_wanted, (number, line)) in enumerate(each):
            if is_wanted:
                row = self.parse(line, index, number)
                if int(row.digest, 16) != int(self.known[index, 1]):
                    raise self._changed()
                yield row
        if index + 1 < len(self):
            raise self._changed()

    def _changed(self) -> UserError:
        return UserError(f"{self.name} was changed while the job read it: start the job again")

    def _numbered(self) -> Iterator[tuple[int, bytes]]:
        for number, line in enumerate(self.lines, 1):
            if line := line.strip():
                yield number, line

    def _check_ids(self) -> None:
        ids = self.known[:, 0]
        suspects = count_each(ids, ids) > 1
        seen = {}
        for row in self.those(suspects) if suspects.any() else ():  # different ids may have the same hash
            first = seen.setdefault(row.id, row.line)
            if first != row.line:
                lines = f"lines {first} and {row.line}"
                raise UserError(f"{self.name}: {lines} have the same custom_id {row.custom_id!r}")


def count_each(wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(N,) int64, how often each of `wanted`, (N,), is among `values`, (M,)."""
    ordered = np.sort(values)
    order = np.argsort(wanted)  # searching in order is several times as fast
    queries = wanted[order]
    found = np.empty(len(wanted), np.int64)
    found[order] = np.searchsorted(ordered, queries, side="right") - np.searchsorted(ordered, queries)
    return found


def read_rows(
    path: str, parse: Callable[[bytes, int, int], Row] | None = None, before: np.ndarray | None = None
) -> Rows:
    """The rows of an input file (- for stdin) or of the files in a folder, by default those of `parse_row`. `before`:
    as of `Rows`. Raises UserError if it cannot be read, is of another form, holds no rows, or has a custom_id twice."""
    content = open_content(path)
    rows = Rows(f"`input_file` {path}", content, parse or parse_row, before)
    if not len(rows):
        raise UserError(f"`input_file` {path} holds no prompts")
    if not rows.has_objects:
        check_no_table(content)
    return rows


class NotAnObject(UserError):
    """A line that is not a JSON object."""


def parse_row(
    line: bytes, index: int, number: int, parse_task: Callable[[dict, Row], None] = tasks.parse_answers
) -> Row:
    """The row of a line of an input file; one that cannot be run has an error in place of a prompt. `parse_task`: sets
    the task of a plain row, whose other keys have been read."""
    row = Row(index, number, _digest(line))
    try:
        data = _object(line)
        custom_id = data.get("custom_id")
        if custom_id is not None and not isinstance(custom_id, str):
            raise UserError("custom_id must be a text")
        row.custom_id = custom_id
        if openai.is_request(data):
            openai.parse(data, row)
            if row.kind in tasks.KEYS:
                tasks.parse_request(data["body"], row)
        else:
            row.params = sampling(data)
            row.prompt = _prompt(data)
            row.set_logprobs(openai.wanted_logprobs(data, row.kind))
            parse_task(data, row)
    except UserError as e:
        row.prompt = e
    return row


def parse_text(line: bytes, index: int, number: int) -> Row:
    """The row of a line of an input file to embed: as `parse_row`, but plain rows are embedded, and other requests have
    an error."""
    row = parse_row(line, index, number, tasks.parse_embed)
    if row.kind not in ("plain", "embedding"):
        row.prompt = RowError("only requests to /v1/embeddings can be embedded: run others with generate", "url")
    return row


def _object(line: bytes) -> dict:
    try:
        data = OBJECT.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
    except (ValueError, RecursionError) as e:
        if isinstance(e, UserError):
            raise
        raise NotAnObject(f"not JSON: {e}") from None
    if not isinstance(data, dict):
        raise NotAnObject("not a JSON object")
    return data


def _without_duplicates(pairs: list[tuple]) -> dict:
    """An object without duplicate keys: Python would take the last value, other readers the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"the key {twice!r} appears twice: leave one out")
    return found


#: `json.loads` would make one for each line
OBJECT = json.JSONDecoder(object_pairs_hook=_without_duplicates)


def _prompt(data: dict) -> str | list[int] | Conversation:
    """The prompt of a plain row. Raises UserError if it has none, or two; null is none."""
    if data.get("messages") is not None:
        for name in ("prompt", "prompt_token_ids"):
            if data.get(name) is not None:
                raise UserError(f'a row has "messages" or a "{name}", not both')
        return openai.conversation(data)
    openai.refuse_chat_keys(data)
    if data.get("prompt_token_ids") is not None:
        if not isinstance(data["prompt_token_ids"], list):
            raise UserError("prompt_token_ids must be a list of token ids")
        return data["prompt_token_ids"]
    if data.get("prompt") is not None:
        if not isinstance(data["prompt"], str):
            raise UserError("prompt must be a text")
        return data["prompt"]
    raise UserError('no "prompt", "prompt_token_ids" or "messages"')


def short_hash(content: bytes) -> int:
    """64 bits."""
    return int.from_bytes(_hash_bytes(content))


def _hash_bytes(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:8]


def _digest(content: bytes) -> str:
    return f"{short_hash(content):016x}"


def id_hash(id: str | int) -> int:
    """64 bits of a row's id."""
    return short_hash(json.dumps(id).encode())


def builtin_rows(tokenizer, vocab: int, count: int, length: int) -> Rows:
    """`builtin_prompts` as rows."""
    lines = [json.dumps(ids).encode() for ids in builtin_prompts(tokenizer, vocab, count, length)]

    def parse(line: bytes, index: int, number: int) -> Row:
        return Row(index, number, _digest(line), prompt=json.loads(line))

    return Rows("the built-in prompts", lines, parse)


def builtin_prompts(tokenizer, vocab: int, count: int, length: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens: passages of `builtin_text` that begin at even distances and wrap
    around at its end; without a tokenizer random ids below `vocab`."""
    if tokenizer is None:
        rng = random.Random(0)
        ids = [rng.randrange(4, vocab) for _ in range(count * length)]
        return [ids[begin : begin + length] for begin in range(0, count * length, length)]
    first = tokenizer("")["input_ids"][:length]  # the tokenizer begins every text with these
    ids = tokenizer(builtin_text(), add_special_tokens=False, verbose=False)["input_ids"]
    left = length - len(first)
    begins = [n * len(ids) // count for n in range(count)]
    ids *= 2 + left // len(ids)
    return [first + ids[begin : begin + left] for begin in begins]
