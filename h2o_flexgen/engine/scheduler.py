"""The scheduler: which rows prefill and which decode in a pass, one walk through the model. Pure Python, no tensors.

A block has as many places for rows as the policy says. A row that has ended leaves its place to a waiting one, which
prefills while the others decode:

    place 0   | prompt A | A | A |          | prompt E | E | E |
    place 1   | prompt B | B | B | B | B    | B        | B | B |
    place 2   | prompt C | C |   | prompt D | D        | D |   |
    pass        0          1   2   3          4          5   6

The places in use are the first ones of each batch: the last rows move up. Once no row waits, batches shrink until the
last row has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from h2o_flexgen.engine.batch import Chunk, ChunkLimits, Piece, PromptPiece, Sequence, cut
from h2o_flexgen.engine.prefixes import Node, nodes_of, order
from h2o_flexgen.planning.workload import FORCED


@dataclass
class BatchPass:
    """One batch in a pass.

    Attributes:
        rows: by place.
        moves: (from, to) of rows that have moved up.
        places: of which more than a token changes: that have received a row, moved or new, or have known tokens.
        opens: (longest prompt, longest output) to lay the batch out for, if it was empty.
    """

    rows: list[Sequence]
    moves: list[tuple[int, int]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    opens: tuple[int, int] | None = None

    @property
    def will_end(self) -> bool:
        """Whether every row is known to end with its next token."""
        return all(s.will_end for s in self.rows)


@dataclass
class Pass:
    """One walk through the model.

    Attributes:
        batches: by number, those with rows.
        is_last: the job is known to end with it.
    """

    batches: dict[int, BatchPass]
    chunks: list[Chunk]
    is_last: bool = False

    @property
    def rows(self) -> list[Sequence]:
        return [s for batch in self.batches.values() for s in batch.rows]

    @property
    def pieces(self) -> list[Piece]:
        return [piece for chunk in self.chunks for piece in chunk.pieces]


class Scheduler:
    """Schedules the rows of a job in passes.

    Args:
        sizes: places of each batch.
        limits: of micro-batches and chunks.
        slots: (tokens of a prompt, of its output) -> slots that such a row needs in each kind of layer.
        shareable: tokens of a row's prompt that it may share with others; None shares nothing.
        ahead: as in `prefixes.Node`.
        window: the most rows that wait; when fewer than half do, more are read.
        least: rows enter when at least this many places are free, or all that wait fit.

    Attributes:
        waiting: rows that have been read, in the order in which they will run.
        running: the rows of each batch.
    """

    def __init__(
        self,
        rows: Iterable[Sequence],
        sizes: list[int],
        limits: ChunkLimits,
        slots: Callable[[int, int], tuple[int, ...]],
        shareable: Callable[[Sequence], int] | None = None,
        ahead: int = 0,
        window: int = 1 << 62,
        least: int = 1,
    ):
        self.sizes = sizes
        self.limits = limits
        self.slots = slots
        self.shareable = shareable or (lambda s: 0)
        self.ahead = ahead
        self.window = window
        self.least = least
        self.waiting: list[Sequence] = []
        self.running: list[list[Sequence]] = [[] for _ in sizes]
        self._rows = iter(rows)
        self._next_row = list(islice(self._rows, 1))  # the row after those that wait
        self._room: list[tuple[int, ...]] = [()] * len(sizes)  # slots of each batch that is not empty
        self._nodes: dict[tuple[int, ...], Node] = {}

    def next(self) -> Pass | None:
        """The next pass; None at the end."""
        self._admit()
        batches = {k: compacted(rows) for k, rows in enumerate(self.running)}
        entered = self._enter(batches)
        self.running = [batches[k].rows for k in range(len(self.sizes))]
        batches = {k: batch for k, batch in batches.items() if batch.rows}
        if not batches:
            return None
        chunks = cut(self._pieces(batches, entered), self.limits)
        ends = all(batch.will_end for batch in batches.values())
        return Pass(batches, chunks, ends and not self.waiting and not self._next_row)

    # rows that enter

    def _admit(self) -> None:
        if not self._next_row or len(self.waiting) * 2 >= self.window:
            return
        new = list(islice(chain(self._next_row, self._rows), self.window - len(self.waiting)))
        self._next_row = list(islice(self._rows, 1))
        self._nodes = {key: node for key, node in self._nodes.items() if node.texts}
        self.waiting = order([*self.waiting, *new], self.shareable, self.ahead, self._nodes)
        for node in self._nodes.values():
            if not node.waiting:  # with the new rows, those that waited for it share other prefixes
                node.texts.clear()

    def _enter(self, batches: dict[int, BatchPass]) -> dict[int, list[Sequence]]:
        """Give free places to waiting rows; returns the new rows of each batch."""
        free = {k: self.sizes[k] - len(batch.rows) for k, batch in batches.items()}
        entered: dict[int, list[Sequence]] = {}
        if sum(free.values()) < min(self.least, len(self.waiting), sum(self.sizes)):
            return entered
        for k, count in free.items():
            batch = batches[k]
            if not batch.rows and self.waiting:
                self._open(k, batch, self.waiting[:count])
            entered[k] = self._take(k, count)
            for s in entered[k]:
                batch.places.append(len(batch.rows))
                batch.rows.append(s)
        return entered

    def _open(self, k: int, batch: BatchPass, first: list[Sequence]) -> None:
        """Lay an empty batch out for the rows that enter first, with room for all that wait."""
        longest = max(len(s.prompt) for s in first)
        output = max(s.params.max_tokens + max(0, len(s.prompt) - longest) for s in self.waiting)
        longest_waiting = max(len(s.prompt) for s in self.waiting)
        longest_output = max(s.params.max_tokens for s in self.waiting)
        if not _fits(self.slots(longest, output), self.slots(longest_waiting, longest_output)):
            output = longest_output  # the cache does not grow with the prompt
        batch.opens = (longest, output)
        self._room[k] = self.slots(longest, output)

    def _take(self, k: int, count: int) -> list[Sequence]:
        """Remove up to `count` waiting rows that fit into the places of a batch."""
        found: list[Sequence] = []
        left: list[Sequence] = []
        for s in self.waiting:
            if len(found) == count:
                break
            needed = self.slots(len(s.prompt), s.params.max_tokens)
            (found if _fits(needed, self._room[k]) else left).append(s)
        self.waiting[: len(found) + len(left)] = left
        return found

    # pieces that they compute

    def _pieces(self, batches: dict[int, BatchPass], entered: dict[int, list[Sequence]]) -> list[Piece]:
        pieces: list[Piece] = []
        computed: set[Node] = set()
        for k, batch in batches.items():
            new = entered.get(k, [])
            old = len(batch.rows) - len(new)
            for piece in prompt_pieces(k, new, list(range(old, len(batch.rows))), self.limits.prefill_tokens):
                for node in nodes_of(piece):
                    if not node.texts and node not in computed:
                        computed.add(node)
                        pieces.append(PromptPiece(k, [node], [], node.parent))
                pieces.append(piece)
            if old:
                pieces.append(self._steps(k, batch, old))
        self._note_last_uses(pieces)
        return pieces

    def _steps(self, k: int, batch: BatchPass, count: int) -> Piece:
        """The decode steps of the first rows of a batch; with known tokens, as many as there is room for."""
        rows = batch.rows[:count]
        counts = shared_out(FORCED * self.sizes[k], [len(s.inputs) for s in rows])
        for place, tokens in enumerate(counts):
            if tokens > 1 and place not in batch.places:  # more than a token of it changes
                batch.places.append(place)
        return Piece(k, rows, list(range(count)), counts=counts)

    def _note_last_uses(self, pieces: list[Piece]) -> None:
        """Set `frees` of the pieces that are the last to use a node that no row waits for."""
        for piece in pieces:
            for s in piece.rows if piece.is_prompt and piece.places else ():
                for node in nodes_of(s):
                    node.waiting -= 1
        seen: set[Node] = set()
        for piece in reversed(pieces):
            nodes = set(nodes_of(piece)) | {s for s in piece.rows if isinstance(s, Node)}
            piece.frees = [node for node in nodes - seen if node.waiting == 0]
            seen |= nodes


def shared_out(room: int, wanted: list[int]) -> list[int]:
    """The same number for each, or all it wants if that is less: the largest number that fits into `room`."""
    left = room
    for n, each in enumerate(sorted(wanted)):
        share = left // (len(wanted) - n)
        if each > share:
            return [min(other, share) for other in wanted]
        left -= each
    return wanted


def _fits(needed: tuple[int, ...], room: tuple[int, ...]) -> bool:
    """Whether a row that needs these slots in each segment fits into a place with `room`."""
    return all(a <= b for a, b in zip(needed, room))


def compacted(rows: list[Sequence]) -> BatchPass:
    """The rows of a batch that still run, with the last ones moved to places that have become free."""
    kept = [place for place, s in enumerate(rows) if s.finish_reason is None]
    holes = [place for place in range(len(kept)) if rows[place].finish_reason is not None]
    moves = list(zip(reversed(kept), holes))
    batch = BatchPass(rows[: len(kept)], moves, holes)
    for source, target in moves:
        batch.rows[target] = rows[source]
    return batch


def prompt_pieces(k: int, rows: list[Sequence], places: list[int], prefill_tokens: int) -> Iterator[PromptPiece]:
    """The prompts of a batch, in micro-batches. `places`: of the rows."""
    begin = 0
    while begin < len(rows):
        end = begin + micro_batch(rows[begin:], prefill_tokens)
        yield PromptPiece(k, rows[begin:end], places[begin:end], rows[begin].path)
        begin = end


def micro_batch(rows: list[Sequence], prefill_tokens: int) -> int:
    """How many of the first rows prefill together: at least one; more while they have the same prefix and fit into
    `prefill_tokens` tokens, prefix and padding included."""
    longest = 0
    for count, s in enumerate(rows):
        longest = max(longest, len(s.prompt))
        if count and (s.path is not rows[0].path or (count + 1) * longest > prefill_tokens):
            return count
    return len(rows)
