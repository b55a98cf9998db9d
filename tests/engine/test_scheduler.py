"""Every row runs once, in a free place, and shared prefixes are computed before their prompts, then freed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.engine import prefixes
from h2o_flexgen.engine.batch import ChunkLimits, Piece, PromptPiece, Sequence, cut
from h2o_flexgen.engine.params import SamplingParams
from h2o_flexgen.engine.prefixes import Node
from h2o_flexgen.engine.scheduler import BatchPass, Pass, Scheduler, micro_batch, shared_out

#: so that few rows fill a matmul
GROUP_ROWS = 6


@pytest.fixture(autouse=True, scope="module")
def small_numbers():
    """Makes nodes pay from two tokens on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST_SAVED", 2)
        patch.setattr(prefixes, "LEAST_TOKENS", 1)
        yield


def row(index: int, prompt: list[int], max_tokens: int = 1) -> Sequence:
    return Sequence(index, prompt, SamplingParams(max_tokens=max_tokens))


#: (tokens of a prompt, of its output) -> the slots of a row
SLOTS = {
    "alike": lambda n, m: (1,),
    "full": lambda n, m: (n + m - 1,),
    "budget": lambda n, m: (min(4, n + m - 2) + 1,),
    "layers": lambda n, m: (min(2, n + m - 2) + 1, min(7, n + m - 2) + 1),
    "prompt compressed": lambda n, m: (min(3, n) + m - 1,),
}


@dataclass
class Job:
    """The arguments of a scheduler, and after how many tokens each row ends."""

    prompts: list[list[int]]
    outputs: list[int]
    ends: list[int]
    sizes: list[int]
    prefill_tokens: int
    slots: str
    shares: bool
    window: int
    least: int

    def rows(self) -> list[Sequence]:
        return [row(n, prompt, most) for n, (prompt, most) in enumerate(zip(self.prompts, self.outputs))]

    def scheduler(self, rows: list[Sequence]) -> Scheduler:
        shareable = (lambda s: len(s.prompt) - 1) if self.shares else None
        how = dict(window=self.window, least=self.least)
        return Scheduler(
            rows,
            self.sizes,
            ChunkLimits(self.prefill_tokens, GROUP_ROWS, GROUP_ROWS),
            SLOTS[self.slots],
            shareable,
            **how,
        )

    @property
    def largest(self) -> tuple[int, ...]:
        """Slots that the caches of the job are allocated with."""
        return SLOTS[self.slots](max(map(len, self.prompts)), max(self.outputs))


@st.composite
def jobs(draw, slots=tuple(SLOTS), early=True, window=True) -> Job:
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        begin = draw(st.sampled_from(prompts)) if prompts and draw(st.booleans()) else []
        begin = begin[: draw(st.integers(0, len(begin)))]
        prompts.append(begin + draw(st.lists(st.integers(0, 1), min_size=0 if begin else 1, max_size=6)))
    outputs = [draw(st.integers(1, 6)) for _ in prompts]
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return Job(
        prompts,
        outputs,
        [draw(st.integers(1, most)) if early else most for most in outputs],
        sizes,
        draw(st.sampled_from([1, 8, 20, 1000])),
        draw(st.sampled_from(slots)),
        draw(st.booleans()),
        draw(st.integers(1, 8)) if window and draw(st.booleans()) else 1 << 62,
        draw(st.integers(1, sum(sizes))),
    )


@dataclass
class Walked:
    """A job that has been run through its passes, as by the engine but without a model.

    Attributes:
        held: (batch, place) -> the row whose cache is there.
        computed: how often each node was; alive: the nodes that are there, after every piece.
        lives: the first and the last pass of each row.
    """

    job: Job
    passes: list[Pass] = field(default_factory=list)
    held: dict[tuple[int, int], Sequence] = field(default_factory=dict)
    computed: Counter = field(default_factory=Counter)
    alive: list[list[Node]] = field(default_factory=list)
    will_end: list[dict[int, bool]] = field(default_factory=list)  # of the batches of each pass
    lives: dict[Sequence, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self):
        self.all = self.job.rows()
        scheduler = self.job.scheduler(self.all)
        while (pass_ := scheduler.next()) is not None:
            assert not (self.passes and self.passes[-1].is_last), "something was left to do"
            self.will_end.append({k: each.will_end for k, each in pass_.batches.items()})
            self.step(pass_)
            for s in pass_.rows:
                self.lives[s] = self.lives.get(s, [len(self.passes)])[0], len(self.passes)
            self.passes.append(pass_)
        assert not scheduler.waiting

    def step(self, pass_: Pass) -> None:
        for k, each in pass_.batches.items():
            for source, target in each.moves:
                assert self.held[k, target].finish_reason is not None, "the place was not free"
                self.held[k, target] = self.held.pop((k, source))
            for place in [place for b, place in self.held if b == k and place >= len(each.rows)]:
                assert self.held.pop((k, place)).finish_reason is not None, "its cache is lost"
        for piece in (piece for chunk in pass_.chunks for piece in chunk.pieces):
            self.compute(piece)
        for s in pass_.rows:
            s.append(0, 0.0)
            if len(s.tokens) == self.job.ends[s.index]:
                s.finish_reason = "stop"

    def compute(self, piece: Piece) -> None:
        for node in piece.path.path() if piece.path else ():
            assert node.texts, "a prompt comes before what it begins with"
        for s in piece.rows:
            if isinstance(s, Node):
                assert not s.texts and not piece.places and s.parent is piece.path
                s.texts[1] = "its keys and values"
                self.computed[s] += 1
        self.alive.append([node for node in self.computed if node.texts])
        for place, s in zip(piece.places, piece.rows, strict=not piece.is_prompt):
            if piece.is_prompt:
                assert not s.length and not s.tokens
                before = self.held.get((piece.batch, place))
                assert before is None or before.finish_reason is not None, "the place was not free"
                self.held[piece.batch, place] = s
            else:
                assert s.length == len(s.prompt) + len(s.tokens) - 1
                assert self.held[piece.batch, place] is s
        for node in piece.frees:
            assert node.texts
            node.texts.clear()
        piece.advance()

    # afterwards

    def batches(self) -> list[tuple[int, int, BatchPass]]:
        """(pass, batch, its `BatchPass`) of all passes."""
        return [(n, k, each) for n, pass_ in enumerate(self.passes) for k, each in pass_.batches.items()]

    def pieces(self) -> list[Piece]:
        return [piece for pass_ in self.passes for chunk in pass_.chunks for piece in chunk.pieces]

    def rows_before(self, n: int, k: int) -> list[Sequence]:
        """The rows of a batch in the pass before pass n, by their places."""
        found = n > 0 and self.passes[n - 1].batches.get(k)
        return found.rows if found else []


# rows and places


@given(job=jobs())
def test_every_row_runs_once_and_to_its_end(job):
    """From the pass in which it prefills, without a gap."""
    walked = Walked(job)
    assert [len(s.tokens) for s in walked.all] == job.ends
    assert [s.length for s in walked.all] == [len(s.prompt) + len(s.tokens) - 1 for s in walked.all]
    for s in walked.all:
        begin, end = walked.lives[s]
        assert end - begin + 1 == len(s.tokens)
        assert all((s in pass_.rows) == (begin <= n <= end) for n, pass_ in enumerate(walked.passes))


@given(job=jobs())
def test_places_say_where_rows_are_and_moves_where_they_were(job):
    """The first places of a batch are in use, and rows move only to places that have become free."""
    walked = Walked(job)
    for n, k, each in walked.batches():
        before = walked.rows_before(n, k)
        assert 1 <= len(each.rows) <= job.sizes[k]
        changed = [place for place, s in enumerate(each.rows) if place >= len(before) or before[place] is not s]
        assert sorted(each.places) == changed
        assert all(each.rows[target] is before[source] and target < source for source, target in each.moves)
        ended = [place for place, s in enumerate(before) if walked.lives[s][1] < n]
        assert {target for _, target in each.moves} <= set(ended)
        new = [s for s in each.rows if walked.lives[s][0] == n]
        assert len(each.places) == len(each.moves) + len(new)
        assert each.rows[len(each.rows) - len(new) :] == new


@given(job=jobs(slots=["alike"], window=False))
def test_no_place_stays_free_while_rows_wait(job):
    """Unless fewer than `least` are."""
    walked = Walked(job)
    for n, pass_ in enumerate(walked.passes):
        waiting = sum(walked.lives[s][0] > n for s in walked.all)
        assert waiting == 0 or sum(job.sizes) - len(pass_.rows) < job.least
        if job.least == 1:
            assert len(pass_.rows) == min(sum(job.sizes), len(pass_.rows) + waiting)


@given(job=jobs())
def test_an_empty_batch_is_laid_out_for_every_row_that_enters_it(job):
    """And within the job's allocation, in each kind of layer."""
    walked = Walked(job)
    room = {}
    slots = SLOTS[job.slots]
    for n, k, each in walked.batches():
        is_empty = all(walked.lives[s][1] < n for s in walked.rows_before(n, k))
        assert (each.opens is not None) == is_empty
        if each.opens is not None:
            room[k] = slots(*each.opens)
            assert fits(room[k], job.largest)
        assert all(fits(slots(len(s.prompt), s.params.max_tokens), room[k]) for s in each.rows)


def fits(needed: tuple[int, ...], room: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(needed, room, strict=True))


@given(job=jobs(early=False))
def test_rows_that_end_by_their_length_are_known_to_end(job):
    """So that nothing more is fetched for them, and nothing at all in the last pass."""
    walked = Walked(job)
    for n, k, each in walked.batches():
        assert walked.will_end[n][k] == all(walked.lives[s][1] == n for s in each.rows)
    *others, last = walked.passes
    assert last.is_last and not any(pass_.is_last for pass_ in others)


@given(job=jobs())
def test_a_job_is_always_scheduled_in_the_same_way(job):
    """Wherever its nodes, which are kept in sets, are in memory."""

    def batches(walked: Walked) -> list:
        return [(k, indices(each.rows), each.moves, each.places) for _, k, each in walked.batches()]

    first = Walked(job)
    litter = [Node(None, []) for _ in range(50)]
    del litter[::2]
    again = Walked(job)
    assert batches(first) == batches(again)
    assert [shape(pass_) for pass_ in first.passes] == [shape(pass_) for pass_ in again.passes]


def indices(rows: list) -> list[int]:
    return [s.index for s in rows]


def shape(pass_: Pass) -> list:
    """The number of pieces of each chunk, and what is in them."""
    sizes = [len(chunk.pieces) for chunk in pass_.chunks]
    return [sizes, *((type(piece), piece.batch, piece.places, piece.ids()) for piece in pass_.pieces)]


def test_rows_are_read_as_they_are_needed():
    """Few of thousands of prompts are in memory: those that wait, and one more, which shows that there are others."""
    read = []

    def rows():
        for n in range(100):
            read.append(n)
            yield row(n, [1, 2], 2)

    scheduler = Scheduler(rows(), [2], ChunkLimits(100, GROUP_ROWS, GROUP_ROWS), SLOTS["full"], window=8)
    while (pass_ := scheduler.next()) is not None:
        assert len(scheduler.waiting) <= 8
        assert len(read) - len(scheduler.waiting) <= 1 + 1 + max(s.index for s in pass_.rows)
        for s in pass_.rows:
            s.length = s.length + 1
            s.prompt_end = 2
            s.tokens.append(0)
            s.finish_reason = "length" if len(s.tokens) == 2 else None
    assert read == list(range(100))


# pieces


@given(job=jobs())
def test_every_token_is_computed_once_and_prefixes_before_their_prompts(job):
    walked = Walked(job)
    own = Counter()
    for piece in walked.pieces():
        for s in piece.rows:
            if piece.is_prompt and piece.places:
                own[s] += 1
    assert own == Counter(walked.all)
    for s in walked.all:
        nodes = s.path.path() if s.path else []
        begins = [0, *(node.end for node in nodes), len(s.prompt)]
        assert begins == sorted(set(begins))
        assert all(node.prompt == s.prompt[: node.end] for node in nodes)


@given(job=jobs())
def test_each_node_is_computed_once_and_freed_once(job):
    walked = Walked(job)
    nodes = {node for s in walked.all if s.path for node in s.path.path()}
    if job.window > len(job.prompts):
        assert set(walked.computed) == nodes
        assert all(count == 1 for count in walked.computed.values())
    assert nodes <= set(walked.computed) and not any(node.texts for node in walked.computed)


@given(job=jobs(slots=["alike"]))
def test_one_path_of_nodes_is_alive_at_a_time(job):
    """As the plan assumes."""
    for alive in Walked(job).alive:
        longest = max(alive, key=lambda node: node.end, default=None)
        assert set(alive) <= set(longest.path() if longest else [])


@given(job=jobs())
def test_micro_batches_and_chunks_stay_within_their_tokens(job):
    walked = Walked(job)
    for pass_ in walked.passes:
        for chunk in pass_.chunks:
            prompts = [piece for piece in chunk.pieces if piece.is_prompt]
            if len(chunk.pieces) > 1:
                assert chunk.size <= (job.prefill_tokens if len(prompts) == len(chunk.pieces) else GROUP_ROWS)
            for piece in prompts:
                assert all(s.path is piece.path for s in piece.rows if isinstance(s, Sequence))
                padded = len(piece.rows) * max(len(s.prompt) for s in piece.rows)
                assert padded <= job.prefill_tokens or len(piece.rows) == 1
        places = [(piece.batch, place) for chunk in pass_.chunks for piece in chunk.pieces for place in piece.places]
        assert sorted(places) == [(k, n) for k, each in pass_.batches.items() for n in range(len(each.rows))]
        batches = [piece.batch for chunk in pass_.chunks for piece in chunk.pieces]
        assert batches == sorted(batches), "a KV block would be staged twice"


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), prefill_tokens=st.integers(1, 100))
def test_prompts_prefill_together_while_they_fit(lengths, prefill_tokens):
    rows = [row(n, [1] * length) for n, length in enumerate(lengths)]
    count = micro_batch(rows, prefill_tokens)
    assert count == 1 or count * max(lengths[:count]) <= prefill_tokens
    assert count == len(rows) or (count + 1) * max(lengths[: count + 1]) > prefill_tokens


@st.composite
def pieces(draw) -> list[Piece]:
    """A few prompts of each batch, and then perhaps a decode step, as in a pass."""
    found: list[Piece] = []
    for k in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(0, 3))):
            prompts = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=3))
            rows = [row(n, prompt) for n, prompt in enumerate(prompts)]
            found.append(PromptPiece(k, rows, list(range(len(rows)))))
        running = [row(n, [1]) for n in range(draw(st.integers(0, 4)))]
        for s in running:
            s.append(5, 0.0)
        found += [Piece(k, running, list(range(len(running))))] if running else []
    return found


@given(pieces=pieces(), prefill_tokens=st.integers(1, 40))
def test_chunks_are_the_pieces_in_their_order(pieces, prefill_tokens):
    """Only chunks of prompts of one batch go to the tier of its hidden states between layers, in order; those with
    decode steps stay."""
    chunks = cut(pieces, ChunkLimits(prefill_tokens, GROUP_ROWS, GROUP_ROWS))
    assert [piece for chunk in chunks for piece in chunk.pieces] == pieces
    ends: dict[int, list[int]] = {}
    for chunk in chunks:
        assert chunk.ids().tolist() == [token for piece in chunk.pieces for token in piece.ids()]
        assert len(chunk.positions.at) == chunk.size
        batches = {piece.batch for piece in chunk.pieces}
        if any(not piece.is_prompt for piece in chunk.pieces):
            assert chunk.home is None and (chunk.size <= GROUP_ROWS or len(chunk.pieces) == 1)
            continue
        assert len(batches) == 1 and (chunk.size <= prefill_tokens or len(chunk.pieces) == 1)
        k, number, before = chunk.home
        assert {k} == batches and number == len(ends.setdefault(k, [])) and before == sum(ends[k])
        ends[k].append(chunk.size)


@given(pieces=pieces(), prefill_tokens=st.integers(1, 40))
def test_no_two_consecutive_chunks_could_be_joined(pieces, prefill_tokens):
    chunks = cut(pieces, ChunkLimits(prefill_tokens, GROUP_ROWS, GROUP_ROWS))
    for one, other in zip(chunks, chunks[1:]):
        first = other.pieces[0]
        size = one.size + first.size
        if one.is_prompts and first.is_prompt and first.batch == one.pieces[0].batch:
            assert size > prefill_tokens
        elif not (one.is_prompts and first.is_prompt):
            assert size > GROUP_ROWS


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 8))
def test_known_tokens_share_the_room_of_a_pass(wanted, each):
    room = each * len(wanted)
    given_to = shared_out(room, wanted)
    most = max(given_to)
    assert sum(given_to) <= room and given_to == [min(count, most) for count in wanted]
    assert most == max(wanted) or sum(min(count, most + 1) for count in wanted) > room


@pytest.mark.parametrize("scored, ends", [(1, False), (5, False), (6, True)])
def test_a_row_with_more_known_tokens_than_a_pass_takes_does_not_end_with_it(scored, ends):
    s = Sequence(0, [1, 2], SamplingParams(max_tokens=10), tokens=[5] * 9, logprobs=[-1.0] * scored)
    s.prompt_end = 2
    s.length = 1 + scored
    assert s.will_end == ends
