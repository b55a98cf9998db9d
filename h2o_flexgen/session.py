"""Sessions: endless streams over a KV cache of a fixed size, opened by `LLM.session`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import ceil

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.outputs import CompletionOutput, completion, text_of
from h2o_flexgen.engine.params import SamplingParams, check_params, params_of_each, whole_number
from h2o_flexgen.engine.runner import Runner
from h2o_flexgen.engine.stop import PARTIAL
from h2o_flexgen.engine.streams import StreamingSampler
from h2o_flexgen.engine.turns import Turns, in_turn
from h2o_flexgen.errors import PlanError, UserError
from h2o_flexgen.kv_cache import head_losses, rule_for
from h2o_flexgen.models.rope import rollable
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.memory import Resources
from h2o_flexgen.planning.planner import Planner
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import KVBudget, Policy, gib

#: upper bound on how much smaller a compressed cache is
MOST_COMPRESSED = 8
#: (number of the stream, next piece of its text)
OnText = Callable[[int, str], None]


class Session:
    """One stream, or several in one block; made by `LLM.session`.

    With several streams every method takes a list with an entry for each stream, None for an idle one, and returns such
    a list; with one stream it takes and returns a single entry. Streams do not see each other.

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
        """
        Args:
            count: streams; None for a single one, without lists.
            most: the most tokens of a stream; None if there is no limit.
        """
        self.model = model
        self.choice = choice
        self.most = most
        self.turns = turns
        self._runner = runner
        self._is_list = count is not None
        self._streams = runner.open(choice, count or 1)
        self._answered = [False] * (count or 1)  # whether the text of each stream ends with an answer
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
        """Continue with a text, or token ids.

        Returns:
            The natural logarithm of the probability of each token, except the first one of a stream.

        Raises:
            UserError: a text that cannot be read, or is too long for positions that do not roll; or the session has
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
        """Continue with a text, and then generate.

        Args:
            text: as for `feed`; an empty one generates at once.
            sampling_params: for all streams, or a list with one for each.
            on_text: called with the number of a stream and each piece of its text as soon as it is known; for a text
                that may end with a stop string, with all of it at its end.

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
        """The model's answer to the user's next message. Only the part of the conversation that is new, as rendered by
        the chat template, is read. Raises UserError as `feed`, or if the model has no chat template."""
        ids = self._encoded(message, self._encode_message)
        found = self._generate(ids, sampling_params, on_text, answered=True)
        outputs = found if self._is_list else [found]
        return self._unwrapped([output and output.text for output in outputs])

    # input

    def _encoded(self, given, encode: Callable[[int, object], list[int]]) -> dict[int, list[int]]:
        """Token ids of each stream that is not idle."""
        if self._streams.ended is not None:
            raise UserError(f"this session has ended ({self._streams.ended}): begin a new one")
        count = len(self._answered)
        each = given if self._is_list else [given]
        if not isinstance(each, (list, tuple)) or len(each) != count:
            raise UserError(f"this session has {count} streams: give a list with an entry, or None, for each")
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
        # the model may have ended its answer as the template does
        return ids[1:] if ids[:1] == waiting and waiting[0] in self._ends[row] else ids

    def _check_lengths(self, ids: dict[int, list[int]], params: Seq[SamplingParams] | None = None) -> None:
        """Raises UserError for a stream that would outgrow the model."""
        for row, tokens in ids.items():
            length = self._streams.length(row, len(tokens)) + (params[row].max_tokens if params else 1)
            if self.most is not None and length > self.most:
                name = f"stream {row}" if self._is_list else "the stream"
                raise UserError(
                    f"{name} would come to {length} tokens, more than the model's {self.most} positions: a session "
                    "with `position_rolling` and a KV budget has no limit"
                )

    # output

    def _generate(self, ids, sampling_params, on_text, answered: bool):
        params = params_of_each(sampling_params, len(self._answered))
        for row in ids:
            check_params(params[row], self.model.tokenizer, self.model.spec.vocab)
            if params[row].answers > 1 or params[row].prompt_logprobs is not None:
                raise UserError("a stream has one answer and no `prompt_logprobs`: leave out n, best_of and these")
        self._check_lengths(ids, params)
        for row in ids:
            self._ends[row] = self.model.eos_ids.union(params[row].stop_token_ids)
        on_tokens = TextStreamer(self.model.tokenizer, on_text) if on_text else lambda sequences: None
        sampler = StreamingSampler(self.model, on_tokens)
        found = {}
        if ids:
            with self._runner.guard():
                found = {s.index: s for s in self._streams.generate(ids, params, sampler)}
        self._end_turn(ids, answered)
        outputs = [None] * len(self._answered)
        for row, s in found.items():
            outputs[row] = completion(s, self.model.tokenizer)
        return self._unwrapped(outputs)

    def _end_turn(self, ids: dict[int, list[int]], answered: bool) -> None:
        for row in ids:
            self._answered[row] = answered

    def _unwrapped(self, each: list):
        return each if self._is_list else each[0]


class TextStreamer:
    """Passes new text of sequences to `on_text` after every step, in whole characters; text that a stop string may cut
    short waits until its sequence has ended."""

    def __init__(self, tokenizer, on_text: OnText):
        self.tokenizer = tokenizer
        self.on_text = on_text
        self._sent = defaultdict(str)

    def __call__(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            text = text_of(s, self.tokenizer)
            sent = self._sent[s.index]
            is_whole = s.finish_reason is not None or not (s.params.stop or text.endswith(PARTIAL))
            if is_whole and len(text) > len(sent):
                self.on_text(s.index, text[len(sent) :])
                self._sent[s.index] = text


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
    """The plan of a session of `count` streams, and the most tokens of a stream, None if there is no limit. Arguments
    are as for `LLM.session`; a policy gets as many batches as the streams need.

    Raises:
        UserError: an argument that cannot be used.
        PlanError: as `Planner.choose`.
    """
    spec = planner.model.spec
    positions = spec.positions
    count = whole_number("`count`", count, 1)
    chunk = whole_number("`chunk`", chunk, 1)
    if kv_budget is None:
        if position_rolling:
            raise UserError("`position_rolling` needs a KV budget: a full cache ends with the model's positions")
        kv_budget = KVBudget.from_size(0, positions, "recent")  # which evicts nothing
    elif not isinstance(kv_budget, KVBudget) or (kv_budget.hh_ratio, kv_budget.recent_ratio) != (None, None):
        raise UserError("the KV budget of a session is in slots, since a stream has no length: KVBudget.from_size(512)")
    elif position_rolling is None:
        position_rolling = True
        try:
            rollable(spec)
        except UserError as e:
            raise UserError(f"{e}. With `position_rolling` off a stream ends with the model's positions") from None
    if head_losses(kv_budget.rule):
        raise UserError("`kv_rule`: `layers` needs texts of a known length, which a stream lacks")
    slots = max((n for layer in kv_budget.by_head or () for n in layer), default=sum(kv_budget.slots(positions)))
    room = max(1, positions - slots) if position_rolling else positions  # the planner refuses slots that leave none
    longest = min(chunk, room)
    one = Workload((longest,), gen_len=slots + 2, cached_len=min(slots, positions), logits=longest)
    kv_budget = replace(kv_budget, position_rolling=bool(position_rolling))
    rule = rule_for(kv_budget, one.longest, one.gen_len, spec)
    _check_count(count, planner.model.shapes(rule, one).kv_bytes, resources)
    workload = replace(one, prompt_lens=one.prompt_lens * count)
    choice = planner.choose(workload, resources, policy, kv_budget, compress_cache)
    if choice.rule.growth != "fixed":
        raise UserError(f"the `kv_rule` {kv_budget.rule} keeps every generated token: a session needs one that evicts")
    batches = ceil(count / choice.policy.gpu_batch_size)
    if choice.policy.num_gpu_batches != batches:
        policy = replace(choice.policy, num_gpu_batches=batches)
        choice = planner.choose(workload, resources, policy, kv_budget, choice.compress_cache)
    return choice, None if position_rolling else positions


def _check_count(count: int, kv_bytes: int, resources: Resources) -> None:
    """Raises PlanError for more streams than this machine can hold in any format, before a plan lists each of them,
    which could fill the memory."""
    room = sum(resources.limits.values())
    if count * kv_bytes // MOST_COMPRESSED > room:
        raise PlanError(f"`count`: {count} streams need more than the {gib(room)} that are free: give fewer")
