"""The Python API: prompts in, text out, with everything between placed by a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.messages import Conversation, checked_kwargs, conversations_of
from h2o_flexgen.engine.model import Prompt
from h2o_flexgen.engine.observer import Observer, Observers, ProgressBar
from h2o_flexgen.engine.outputs import OutputCollector, RequestOutput, ScoreOutput, complete, complete_score
from h2o_flexgen.engine.params import Answer, PoolingParams, SamplingParams, list_of
from h2o_flexgen.engine.pooling import EmbeddingOutput, complete_embedding, embed_each
from h2o_flexgen.engine.requests import (
    JobSpec,
    Requests,
    admit,
    list_each,
    one_pass,
    prompts_of,
    read_each,
    to_score,
    workload_of,
)
from h2o_flexgen.engine.runner import Runner
from h2o_flexgen.engine.sampling import Sampler, TeacherForcing
from h2o_flexgen.engine.scoring import AnswersOutput, Questions
from h2o_flexgen.engine.step import LogitsSink
from h2o_flexgen.engine.tools import checked_tools
from h2o_flexgen.engine.turns import Turns, in_turn
from h2o_flexgen.engine_args import EngineArgs, job_planner, load
from h2o_flexgen.kv_cache import head_losses
from h2o_flexgen.machine.device import check_devices, open_device
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.memory import Resources
from h2o_flexgen.planning.workload import WINDOW_BLOCKS, Workload
from h2o_flexgen.policy import TEXT, KVBudget, Policy
from h2o_flexgen.profiling.head_slots import HeadSlots
from h2o_flexgen.session import Session, choose

#: tokens of a stream that are read at once
STREAM_CHUNK = 256


class LLM:
    """A model that need not fit into memory.

    Threads may share one: their calls take turns, and `report` is that of the last one. A call from within another one,
    as from `on_output`, is a UserError, and so is one in a process that was forked after an LLM was made.

    Args:
        model, policy, kv_budget, device, dtype, options: as for `EngineArgs`.

    Attributes:
        policy, kv_budget, compress_cache, observer: as given; changing them affects the next job.
        devices: those that hold the model; `device` is the first, whose types and rates count for all.
        choice: what the planner chose for the last job, known before anything is allocated; None before.
        expect_len: tokens of the average output, if you know them; None expects the most that is allowed. Affects speed
            only, through the policy.
        report: the measurements of the last job, as plain data; {} before, and after one that failed.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        policy: Policy | str | Path = "auto",
        kv_budget: KVBudget | str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        **options,
    ):
        self.turns = Turns()
        args = EngineArgs(model, policy, kv_budget, device, dtype, **options)
        self.devices = [open_device(name) for name in args.device_names]
        check_devices(self.devices)
        self.device = self.devices[0]
        self.policy = args.policy
        self.kv_budget = args.kv_budget
        self.compress_cache = args.compress_cache
        self.caps = args.caps
        self.progress = args.progress
        self.observer = args.observer
        self.choice: ExecutionPlan | None = None
        self.report: dict = {}
        self.expect_len: float | None = None
        self.model = load(args, self.device)
        self.dtype = self.model.dtype
        self.spec = self.model.spec
        self.tokenizer = self.model.tokenizer
        self.eos_ids = self.model.eos_ids
        self.runner = Runner(self.model, self.devices, args.offload_dir, args.caps["gpu"], args.progress)
        self.planner = job_planner(args, self.model, self.device)
        self.head_slots = HeadSlots(self.model, args.progress)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Free memory, threads and the offload folder once no other call runs; the next job loads the weights again."""
        if not self.turns.is_forked:  # in a fork they belong to the parent
            self._close()

    @in_turn
    def _close(self) -> None:
        self.runner.close()

    def resources(self) -> Resources:
        """The memory that a job may use now."""
        available = self.runner.available()
        workspace = max(device.workspace_bytes for device in self.devices)
        return Resources.capped(available, self.caps, self.device.is_cuda, self.runner.baseline(), workspace)

    @property
    def position_rolling(self) -> bool:
        """Whether positions roll, so that an output may outgrow the model's."""
        return isinstance(self.kv_budget, KVBudget) and self.kv_budget.position_rolling

    def admit(self, prompt: Prompt, gen_len: int) -> list[int]:
        """Token ids of a prompt, if there is room for an output of `gen_len` tokens. Raises UserError if there is not,
        and as `LoadedModel.encode`."""
        return admit(self.model, prompt, gen_len, self.position_rolling)

    @in_turn
    def generate(
        self,
        prompts: str | Seq[Prompt] | Iterator[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | Iterator[SamplingParams] | None = None,
        *,
        keys: Seq[int] | Iterator[int] | None = None,
        skip_errors: bool = False,
        on_output: Callable[[RequestOutput], None] | None = None,
        longest_prompt: int | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts; results in the order of the prompts.

        With `on_output` an iterator of prompts is read while others run, a few thousand at a time, and outputs are
        passed to `on_output` alone, as soon as their rows have ended: memory does not grow with the job.

        Args:
            prompts: texts, lists of token ids, or conversations, which go through the model's chat template: lists of
                messages, each {"role": "user", "content": "text"} or of another role that the template knows. A history
                may hold content parts of type text, and tool calls, as OpenAI has them.
            sampling_params: for all prompts, or one for each.
            keys: a number below 2**64 for each prompt. Random numbers depend only on the seed, the key and the step:
                with its old key a prompt gets its old text in any job. Default: places in the job.
            skip_errors: a prompt that cannot be run becomes an output with `error` instead of raising.
            on_output: called with every output as soon as its row has ended, unless no prompt can be run. Outputs that
                it received before an interrupt are final.
            longest_prompt: tokens of the longest prompt of an iterator; required by a KV budget that is a ratio or
                "auto". A longer prompt gets an error.

        Raises:
            UserError: a prompt that cannot be run, such as one with stop strings without a tokenizer; parameters or
                keys that are not one for each prompt; or too little memory.
        """
        self.report = {}
        is_read_ahead = isinstance(prompts, Iterator) and on_output is not None
        each = (read_each if is_read_ahead else list_each)(prompts, sampling_params, keys)
        requests = Requests(self.model, each, self.position_rolling, skip_errors)
        finish = partial(complete, tokenizer=self.tokenizer)
        collector = OutputCollector(requests.outputs, finish, on_output, keeps=not is_read_ahead)
        if is_read_ahead:
            rows, workload = requests.read_ahead(longest_prompt, self.kv_budget, self.compress_cache)
            requests.refused = collector.hand_on
        else:
            rows = list(requests)
            workload = workload_of(rows)
        if workload is not None:
            self._run(self._job(rows, workload), collector)
        return [] if is_read_ahead else list(requests.outputs.values())

    def chat(
        self,
        conversations: Seq[dict] | Seq[Seq[dict]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        chat_template_kwargs: dict | None = None,
        tools: Seq[dict] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        **options,
    ) -> list[RequestOutput]:
        """The model's answer to one conversation or to each of several; otherwise as `generate`.

        Args:
            chat_template_kwargs: variables of the chat template, such as {"enable_thinking": False}; they override
                those of the LLM.
            tools: functions that the model may call, as OpenAI has them: {"type": "function", "function": {"name",
                "description", "parameters"}}. Calls are in `tool_calls` of an output.
            continue_final_message: the model continues the last message, instead of beginning an answer.
            add_generation_prompt: the prompt ends with the beginning of an answer; default: unless the last message is
                continued.
            options: `keys`, `skip_errors` and `on_output` of `generate`.

        Raises:
            UserError: malformed tools, or a message continued behind the beginning of an answer; for a template without
                tools, or a last message that it changes, as for any conversation that cannot be run.
        """
        like = Conversation(
            [],
            checked_kwargs(chat_template_kwargs),
            checked_tools(tools),
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
        )
        return self.generate(conversations_of(conversations, like), sampling_params, **options)

    @in_turn
    def score(
        self,
        texts: str | Seq[str | Seq[int]],
        prompt_len: int | Seq[int] | None = None,
        *,
        first_scored: int | Seq[int] | None = None,
        on_output: Callable[[ScoreOutput], None] | None = None,
    ) -> list[ScoreOutput]:
        """Log-probabilities of texts under the model, in blocks and on all tiers as in `generate`.

        The last token of a text is never an input, so a text may have one token more than the model has positions.

        Args:
            texts: texts, or lists of token ids.
            prompt_len: tokens of each text that are its prompt: a number for all texts, or one for each. The others are
                decode steps, several in a pass where weights stream, so that the KV budget acts as in generation. None
                reads a whole text in one pass, with full attention.
            first_scored: the first token of each text to score, counted from 0: by default the first one after the
                prompt, or the second one of the text. What texts have in common before it is computed once.
            on_output: called with every output that is scored, as soon as its text has ended.

        Returns:
            In the order of the texts. One that cannot be scored has an `error`; the others are not affected.

        Raises:
            UserError: `prompt_len` is not a positive whole number, or not one for each text; or too little memory.
        """
        self.report = {}
        what = "`texts` must be a text, or a list of texts and lists of token ids"
        texts = [texts] if isinstance(texts, str) else list_of(what, texts)
        sequences, outputs, targets = to_score(self.model, texts, prompt_len, first_scored, self.position_rolling)
        if sequences:
            sink = TeacherForcing(targets)
            scored = {s.index: outputs[s.index] for s in sequences}
            finish = partial(complete_score, greedy_token_ids=sink.greedy_token_ids)
            collector = OutputCollector(scored, finish, on_output)
            workload = workload_of(sequences)
            self._run(self._job(sequences, replace(workload, is_known=workload.gen_len > 1), sink), collector)
        return outputs

    @in_turn
    def score_answers(self, prompts: str | Seq[Prompt], answers: Seq[Answer] | Seq[Seq[Answer]]) -> list[AnswersOutput]:
        """Classification without generation: how likely each of several given answers to a prompt is. A prompt is
        computed once for all its answers, unless it is too short to be worth sharing (`engine.prefixes`), in one pass
        with full attention, whatever the KV budget.

        Args:
            prompts: as for `generate`.
            answers: texts, or lists of token ids: one list for all prompts, or a list with one for each. A text
                continues the prompt's text as it stands: it may have to begin with a space.

        Returns:
            In the order of the prompts. One whose answers cannot be scored has an `error`; the others are not affected.

        Raises:
            UserError: `answers` is not one list for all prompts or one for each; or too little memory.
        """
        self.report = {}
        questions = Questions(self.model, prompts_of(prompts), answers)
        if questions.sequences:
            self._run(one_pass(questions.sequences), Observer())
        return questions.complete()

    @in_turn
    def embed(self, prompts: str | Seq[Prompt], pooling: str = "mean", normalize: bool = True) -> list[EmbeddingOutput]:
        """Embeddings of texts: the hidden states after the model's final norm (transformers' `last_hidden_state`),
        pooled into one vector each, in one pass with full attention, whatever the KV budget. The head is not run.

        Args:
            prompts: as for `generate`.
            pooling, normalize: as for `PoolingParams`.

        Returns:
            In the order of the prompts. One that cannot be embedded has an `error`; the others are not affected.

        Raises:
            UserError: `pooling` or `normalize` is not one of their values; or too little memory.
        """
        self.report = {}
        sequences, outputs = embed_each(self.model, prompts_of(prompts), PoolingParams(pooling, normalize))
        if sequences:
            self._run(one_pass(sequences), Observer())
        for s in sequences:
            complete_embedding(outputs[s.index], s)
        return outputs

    @in_turn
    def session(
        self,
        kv_budget: KVBudget | None = None,
        *,
        count: int | None = None,
        position_rolling: bool | None = None,
        chunk: int = STREAM_CHUNK,
    ) -> Session:
        """Endless streams over KV caches of a fixed size, which are placed as in a job.

        Args:
            kv_budget: slots, by default those of the LLM; without any the caches are full, and a stream ends with the
                model's positions.
            count: several streams in one block; the session's methods then take and return lists.
            position_rolling: the tokens in a cache have positions 0, 1, 2 ..., so that a stream may outgrow the model's
                (RoPE only). Default: with a KV budget.
            chunk: the most tokens that are read at once. All of them see the same cached tokens, some of which are then
                evicted.

        Raises:
            UserError: an argument that cannot be used, positions that cannot roll, or too little memory.
        """
        self.runner.end_streams("the next session of its model began")
        self._reset_meters()
        self.choice, most = choose(
            self.planner,
            self.resources(),
            self._given_policy,
            self._of_stream(kv_budget or self.kv_budget),
            self.compress_cache,
            1 if count is None else count,
            position_rolling,
            chunk,
        )
        self.observer.on_plan(self.choice)
        self.choice.plan.check()
        return Session(self.model, self.runner, self.turns, self.choice, count, most)

    def _of_stream(self, budget: KVBudget | str | None) -> KVBudget | str | None:
        """The budget of a session with the slots of each head, which must leave positions for new tokens."""
        if not isinstance(budget, KVBudget) or (budget.hh_ratio, budget.recent_ratio) != (None, None):
            return budget
        slots = sum(budget.slots(self.spec.positions))
        if TEXT * slots > self.spec.positions or head_losses(budget.rule):
            return budget
        workload = Workload((slots,), gen_len=slots + 2)
        self.head_slots.measure(budget, workload)
        return self.head_slots.shared(budget, workload)

    def plan(self, workload: Workload, kv_budget: KVBudget | str | None, compress_cache: str | None) -> ExecutionPlan:
        """What the planner chooses for a job now, with the slots of each KV head; nothing is allocated. Raises
        UserError if nothing fits, or as `Planner.choose`."""
        if workload.mean_len is None:
            workload = replace(workload, mean_len=self.expect_len)
        choose = lambda *asked: self.planner.choose(workload, self.resources(), self._given_policy, *asked)
        choice = None
        is_sized = isinstance(kv_budget, KVBudget) and workload.gen_len > 1
        if not is_sized or not self.head_slots.are_known(kv_budget, workload):  # measuring may take a part of the job
            choice = choose(kv_budget, compress_cache)
            kv_budget = choice.kv_budget
            compress_cache = choice.compress_cache
        if kv_budget is None or workload.gen_len == 1:
            return choice
        if choice is None:
            return choose(self.head_slots.shared(kv_budget, workload), compress_cache)
        seconds = choice.prediction.job_seconds if choice.prediction else 0.0
        limits = self.resources().limits
        room = min(limit for tier, limit in limits.items() if tier != "disk")
        self.head_slots.measure(kv_budget, workload, seconds, room)
        self.device.release_gaps()
        self._reset_meters()
        shared = self.head_slots.shared(kv_budget, workload)
        return replace(choose(shared, compress_cache), curve=choice.curve)

    @in_turn
    def run(self, job: JobSpec, writer: Observer) -> None:
        """Run rows that have been admitted. `writer` sees each of them in `on_finished`, as soon as it has ended.

        Raises:
            UserError: too little memory, or as `Runner.run`.
        """
        self.report = {}
        self._run(job, writer)

    def _job(self, rows: Iterable[Sequence], workload: Workload, sink: LogitsSink | None = None) -> JobSpec:
        return JobSpec(rows, workload, self.kv_budget, self.compress_cache, sink)

    def _reset_meters(self) -> None:
        for device in self.devices:
            device.reset_meters()

    @property
    def _given_policy(self) -> Policy | None:
        return None if self.policy == "auto" else self.policy

    def _run(self, job: JobSpec, writer: Observer) -> None:
        self.runner.end_streams("another job of its model began")
        self._reset_meters()
        workload = job.workload
        self.choice = job.plan or self.plan(workload, job.kv_budget, job.compress_cache)
        bar = ProgressBar(workload.output_tokens, len(workload.prompt_lens), len(self.model.layers), self.progress)
        observers = Observers(writer, bar, self.observer)
        observers.on_plan(self.choice)
        self.choice.plan.check()
        window = job.window or max(workload.window or 1 << 62, WINDOW_BLOCKS * self.choice.policy.block_size)
        sink = job.sink or Sampler(self.eos_ids, self.tokenizer, self.spec.vocab)
        try:
            self.report = self.runner.run(self.choice, job.rows, sink, observers, window, job.is_sound)
        finally:
            bar.close()
