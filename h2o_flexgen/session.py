"""Sessions: streams without end over a KV cache of a fixed size, which `LLM.session` opens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import ceil
from numbers import Integral

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.outputs import CompletionOutput, completion, text_of
from h2o_flexgen.engine.params import SamplingParams, check_stop, params_of_each
from h2o_flexgen.engine.runner import Runner
from h2o_flexgen.engine.stop import PARTIAL
from h2o_flexgen.engine.streams import StreamingSampler
from h2o_flexgen.engine.turns import Turns, in_turn
from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.kv_cache import layer_losses, rule_for
from h2o_flexgen.models.rope import rollable
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.memory import Resources
from h2o_flexgen.planning.planner import Planner
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import KVBudget, Policy, gib

#: more than a compressed cache is smaller than one in floats
MOST_COMPRESSED = 8
#: (number of the stream, text that follows what came before)
OnText = Callable[[int, str], None]


class Session:
    """One stream, or several in one block; `LLM.session` makes it.

    With several streams every method takes a list with an entry for each, None for one that has nothing to do, and
    returns such a list; with one, what an entry is. Streams do not see each other.

    A call that raises UserError before it computes changes nothing. Any other error, and an interrupt, ends the
    session, as do `close`, `LLM.close` and the next job or session of the same `LLM`.
    """

    def __init__(
        self,
        model: LoadedModel,
        runner: Runner,
        turns: Turns,
        choice: ExecutionPlan,
        count: int | None,
        most: int | None,
    ):
        """`count`: None for a single stream, not a list; `most`: tokens that a stream can have, None if there is no
        end."""
        self.model = model
        self.choice = choice
        self.most = most
        self.turns = turns
        self._runner = runner
        self._is_list = count is not None
        self._streams = runner.open(choice, count or 1)
        self._answered = [False] * (count or 1)  # whether the text ends with an answer
        self._ends = [model.eos_ids] * (count or 1)  # token ids that end an answer

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Free the caches; the weights stay with the LLM."""
        if not self.turns.is_forked:
            self._close()

    @in_turn
    def _close(self) -> None:
        if self._streams.ended is None:
            self._runner.end_streams("it was closed")

    def lengths(self) -> int | list[int]:
        """Tokens of the text so far."""
        return self._unwrapped([stream.seen + len(stream.waiting) for stream in self._streams.streams])

    @in_turn
    def feed(self, text: str | Seq[int] | None | list) -> list[float] | list[list[float] | None]:
        """Read on. `text`: a text or token ids.

        Returns:
            The natural logarithm of the probability of each token; the first one of a stream has none.

        Raises:
            UserError: a text that cannot be read, or that is too long where positions do not roll; or the session has
                ended.
        """
        ids = self._encoded(text, self._encode)
        self._check_lengths(ids)
        with self._runner.guard():
            found = self._streams.feed(ids)
        self._end_turn(ids, answered=False)
        return self._unwrapped([found.get(row) for row in range(len(self._answered))])

    @in_turn
    def generate(
        self,
        text: str | Seq[int] | None | list,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        on_text: OnText | None = None,
    ) -> CompletionOutput | list[CompletionOutput | None]:
        """Read on, and then write. `text`: as for `feed`, or an empty one to write on at once.

        Args:
            sampling_params: for all streams, or a list with one for each.
            on_text: is called with the number of a stream and a piece of text as soon as there is one; where a text may
                end with a stop string, with all of it at its end.

        Raises:
            UserError: as `feed`.
        """
        ids = self._encoded(text, self._encode_or_nothing)
        return self._generate(ids, sampling_params, on_text, answered=False)

    @in_turn
    def chat(
        self,
        message: str | None | list,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        on_text: OnText | None = None,
    ) -> str | list[str | None]:
        """The model's answer to the user's next message. Of what the chat template makes of the conversation only what
        is new is read.

        Raises:
            UserError: as `feed`, or the model has no chat template.
        """
        ids = self._encoded(message, self._encode_message)
        found = self._generate(ids, sampling_params, on_text, answered=True)
        outputs = found if self._is_list else [found]
        return self._unwrapped([output and output.text for output in outputs])

    # what goes in

    def _encoded(self, given, encode: Callable[[int, object], list[int]]) -> dict[int, list[int]]:
        """Token ids of each stream that has something to do."""
        if self._streams.ended is not None:
            raise UserError(f"this session has ended ({self._streams.ended}): begin a new one")
        count = len(self._answered)
        each = given if self._is_list else [given]
        if not isinstance(each, (list, tuple)) or len(each) != count:
            raise UserError(f"this session has {count} streams: give a list with something, or None, for each")
        return {row: encode(row, text) for row, text in enumerate(each) if text is not None or not self._is_list}

    def _encode(self, row: int, text) -> list[int]:
        if isinstance(text, (list, tuple)) and text and isinstance(text[0], dict):
            raise UserError("a stream reads texts and token ids; messages are for `chat`")
        return self.model.encode(text, begins=self._streams.length(row, 1) == 0)

    def _encode_or_nothing(self, row: int, text) -> list[int]:
        if text in ("", [], ()) and self._streams.streams[row].waiting:
            return []
        return self._encode(row, text)

    def _encode_message(self, row: int, message) -> list[int]:
        if not self._answered[row]:
            return self.model.encode([{"role": "user", "content": message}])
        ids = self.model.encode_next(message)
        waiting = self._streams.streams[row].waiting
        # the model has ended its answer as the template would
        return ids[1:] if ids[:1] == waiting and waiting[0] in self._ends[row] else ids

    def _check_lengths(self, ids: dict[int, list[int]], params: Seq[SamplingParams] | None = None) -> None:
        """Raises UserError for a stream that would outgrow the model."""
        for row, tokens in ids.items():
            length = self._streams.length(row, len(tokens)) + (params[row].max_tokens if params else 1)
            if self.most is not None and length > self.most:
                of = f"stream {row}" if self._is_list else "the stream"
                raise UserError(
                    f"{of} would come to {length} tokens, more than the model's {self.most} positions: a session with "
                    "`position_rolling` and a KV budget goes on"
                )

    # what comes out

    def _generate(self, ids, sampling_params, on_text, answered: bool):
        params = params_of_each(sampling_params, len(self._answered))
        for row in ids:
            check_stop(params[row], self.model.tokenizer, self.model.spec.vocab)
        self._check_lengths(ids, params)
        for row in ids:
            self._ends[row] = self.model.eos_ids.union(params[row].stop_token_ids)
        tell = TextStreamer(self.model.tokenizer, on_text) if on_text else lambda sequences: None
        sampler = StreamingSampler(self.model.eos_ids, self.model.tokenizer, tell)
        found = {}
        if ids:
            with self._runner.guard():
                found = {s.index: s for s in self._streams.generate(ids, params, sampler)}
        self._end_turn(ids, answered)
        done = [row in found and completion(found[row], self.model.tokenizer) for row in range(len(self._answered))]
        return self._unwrapped([output or None for output in done])

    def _end_turn(self, ids: dict[int, list[int]], answered: bool) -> None:
        for row in ids:
            self._answered[row] = answered

    def _unwrapped(self, each: list):
        return each if self._is_list else each[0]


class TextStreamer:
    """Hands texts on as their tokens come, in whole characters."""

    def __init__(self, tokenizer, on_text: OnText):
        self.tokenizer = tokenizer
        self.on_text = on_text
        self._told = defaultdict(str)

    def __call__(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            text = text_of(s, self.tokenizer)
            told = self._told[s.index]
            is_whole = s.finish_reason is not None or not (s.params.stop or text.endswith(PARTIAL))
            if is_whole and len(text) > len(told):
                self.on_text(s.index, text[len(told) :])
                self._told[s.index] = text


def choose(
    planner: Planner,
    resources: Resources,
    policy: Policy | None,
    kv_budget: KVBudget | str | None,
    compress_cache: str | None,
    count: int,
    position_rolling: bool | None,
    chunk: int,
) -> tuple[ExecutionPlan, int | None]:
    """What runs a session of `count` streams, and the most tokens of a stream, None if there is no end. The arguments
    are those of `LLM.session`; a policy gets as many batches as the streams need.

    Raises:
        UserError: an argument that cannot be used.
        PlanError: as `Planner.choose`.
    """
    spec = planner.model.spec
    positions = spec.context
    for name, value in (("count", count), ("chunk", chunk)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise UserError(f"`{name}` must be a whole number, 1 or more, not {value!r}")
    if kv_budget is None:
        if position_rolling:
            raise UserError("`position_rolling` needs a KV budget: a full cache ends with the model's positions")
        kv_budget = KVBudget.from_size(0, positions, "recent")  # all that there can be
    elif not isinstance(kv_budget, KVBudget) or (kv_budget.hh_ratio, kv_budget.recent_ratio) != (None, None):
        raise UserError("the KV budget of a session is in slots, since a stream has no length: KVBudget.from_size(512)")
    elif position_rolling is None:
        position_rolling = True
        try:
            rollable(spec)
        except UserError as e:
            raise UserError(f"{e}. With `position_rolling` off a stream ends with the model's positions") from None
    if layer_losses(kv_budget.rule):
        raise UserError("`kv_rule`: `layers` shares out the slots of texts of a known length, which a stream has not")
    slots = sum(kv_budget.slots(positions))
    room = max(1, positions - slots) if position_rolling else positions  # the planner refuses slots that leave none
    one = Workload((min(chunk, room),), gen_len=slots + 2, cached_len=min(slots, positions))
    kv_budget = replace(kv_budget, position_rolling=bool(position_rolling))
    rule = rule_for(kv_budget, one.longest, one.gen_len, spec)
    _check_count(count, planner.model.shapes(rule, one).kv_bytes, resources)
    workload = replace(one, prompt_lens=one.prompt_lens * count)
    choice = planner.choose(workload, resources, policy, kv_budget, compress_cache)
    if choice.rule.growth != "fixed":
        raise UserError(f"the `kv_rule` {kv_budget.rule} keeps all that is generated: a session needs one with an end")
    batches = ceil(count / choice.policy.gpu_batch_size)
    if choice.policy.num_gpu_batches != batches:
        policy = replace(choice.policy, num_gpu_batches=batches)
        choice = planner.choose(workload, resources, policy, kv_budget, choice.compress_cache)
    return choice, None if position_rolling else positions


def _check_count(count: int, kv_bytes: int, resources: Resources) -> None:
    """Raises PlanError for streams that no machine like this one can hold, however their caches are compressed: a
    plan lists them all, which might fill the memory."""
    room = sum(resources.limits.values())
    if count * kv_bytes // MOST_COMPRESSED > room:
        raise PlanError(f"`count`: {count} streams need more than the {gib(room)} that are free: give fewer")
