"""The Python API: prompts in, text out, with everything between placed by a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.messages import Conversation, checked_kwargs, is_conversation
from h2o_flexgen.engine.model import Prompt, load_model
from h2o_flexgen.engine.observer import Observer, Observers, ProgressBar
from h2o_flexgen.engine.outputs import CompletionOutput, OutputCollector, RequestOutput, ScoreCollector, ScoreOutput
from h2o_flexgen.engine.params import SamplingParams, keys_of_each, list_of, params_of_each, whole_number
from h2o_flexgen.engine.prefixes import shared_tokens
from h2o_flexgen.engine.requests import Requests, admit, each_of, to_score
from h2o_flexgen.engine.runner import Runner
from h2o_flexgen.engine.sampling import Sampler, TeacherForcing
from h2o_flexgen.engine.step import LogitsSink
from h2o_flexgen.engine.turns import Turns, in_turn
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import dtype_name
from h2o_flexgen.formats.forms import cache_formats
from h2o_flexgen.kernels import rowwise
from h2o_flexgen.kernels.linear import takes_in_blocks
from h2o_flexgen.kv_cache.full import prepare_cache
from h2o_flexgen.machine.device import open_device
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.models.repository import with_revision
from h2o_flexgen.planning.budget import MIN_HH_RATIO
from h2o_flexgen.planning.execution_plan import ExecutionPlan
from h2o_flexgen.planning.losses import Losses
from h2o_flexgen.planning.memory import Resources
from h2o_flexgen.planning.planner import Planner, check_cpu_cap
from h2o_flexgen.planning.search import Constraints
from h2o_flexgen.planning.shapes import ModelData
from h2o_flexgen.planning.workload import WINDOW, WINDOW_BLOCKS, Workload
from h2o_flexgen.policy import TIERS, KVBudget, Policy, given_policy
from h2o_flexgen.profiling.measure import job_dtype, kept_profile, load_or_measure
from h2o_flexgen.session import Session, choose
from h2o_flexgen.storage.disk import default_root

#: tokens of a stream that are read at once
STREAM_CHUNK = 256

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "ScoreOutput"]


class LLM:
    """A model that need not fit into memory.

    Threads may share one: their calls take turns, and `report` is the last
    one's. A call from within another one, as from `on_output`, is a UserError,
    and so is one in a process that was forked after an LLM was made.

    Args:
        model: folder, Hugging Face name, or None for the demo model.
        policy: a Policy, the path of one as JSON, or "auto": everything on the compute device if the model and a batch
            of up to 64 prompts fit; else, or with `max_latency`, or on CUDA with more prompts than one batch, the
            policy that the search finds fastest on this machine, which is measured once (about a minute).
        kv_budget: slots for heavy hitters and recent tokens; None keeps the full cache; "auto" takes the largest
            budget that costs no throughput (see `planning.budget`).
        device: "auto", "cpu", "cuda", "cuda:N".
        dtype: a float type's name, or "auto": on CUDA fp16, or bf16 for a checkpoint in bf16 where the GPU has it; on
            the CPU the type whose matmuls are the fastest, by measuring (`kernels.linear`).
        revision: of a repository on the hub, a branch, tag or commit, as `model` "NAME@REVISION" says it too.
        path: folder of the weights if it is not `model`'s; "_DUMMY_" for random weights of the named size.
        compress_weight: "int8" or "int4": matrices are quantised, once, into a copy in the cache folder
            (`compression.compressed`); None: they are as the checkpoint has them.
        compress_cache: "int8" or "int4": what is cached of K and V is quantised, a token at a time
            (`compression.cache_format`); None: it is in the type of the computation; "auto": that of these with the
            least loss which costs no throughput.
        compute: "exact": what is quantised is decoded to floats for its matmuls; "int8": it is multiplied in int8
            (`kernels.int8`), which is faster and costs a little quality. None: as a policy file says, else "exact".
        in_blocks: with it, whether weights in 4 bits are multiplied as they are stored; None: as this CPU is faster.
        offload_dir: folder for the cache, hidden states and random weights on disk, in files without a name.
        gpu_mem, cpu_mem, disk_mem: the most bytes to use of a tier (default: all that is free).
        gpu_batch_size, num_gpu_batches, prefill_tokens, overlap, cpu_cache_compute: given ones are not searched by
            policy "auto".
        hardware: a profile as `python -m h2o_flexgen.commands.hardware` writes it, instead of measuring.
        max_latency: the most seconds that a block may take, for policy "auto".
        min_hh_ratio: the floor of kv_budget "auto".
        chat_template_kwargs: variables of the model's chat template, such as {"enable_thinking": False}.
        losses: what budgets cost in quality, for kv_budget "auto": it stays within their `max_loss`.
        progress: show bars on stderr.
        observer: is told of the policy, and of steps, batches and blocks as they run.

    Attributes:
        choice: the policy of the last job with its plan, known before anything is allocated; None before.
        expect_len: tokens of the average output, as far as you know; None: as many as it may have. Only how soon the
            job is done depends on it, and on that the policy.
        report: the measurements of the last job, as plain data; {} before, and after one that failed.

    Raises:
        UserError: an argument that cannot be used, with what to do about it.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        policy: Policy | str = "auto",
        kv_budget: KVBudget | str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        *,
        revision: str | None = None,
        path: str | None = None,
        compress_weight: str | None = None,
        compress_cache: str | None = None,
        compute: str | None = None,
        in_blocks: bool | None = None,
        offload_dir: str | Path | None = None,
        gpu_mem: int | None = None,
        cpu_mem: int | None = None,
        disk_mem: int | None = None,
        gpu_batch_size: int | None = None,
        num_gpu_batches: int | None = None,
        prefill_tokens: int | None = None,
        overlap: bool | None = None,
        cpu_cache_compute: bool | None = None,
        hardware: str | Path | Profile | None = None,
        max_latency: float | None = None,
        min_hh_ratio: float = MIN_HH_RATIO,
        losses: Losses | None = None,
        chat_template_kwargs: dict | None = None,
        progress: bool = True,
        observer: Observer | None = None,
    ):
        self.turns = Turns()
        self.device = open_device(device)
        cuda = self.device.is_cuda
        if dtype != "auto":
            self.device.dtype(dtype)  # raises for one that is not known
        given = given_policy(policy, kv_budget, compress_cache, compress_weight, compute)
        self.policy, self.kv_budget, self.compress_cache, compress_weight, compute = given
        searched = dict(gpu_batch_size=gpu_batch_size, num_gpu_batches=num_gpu_batches, overlap=overlap)
        searched |= dict(prefill_tokens=prefill_tokens, cpu_cache_compute=cpu_cache_compute, max_latency=max_latency)
        if self.policy != "auto" and (given := [f"`{name}`" for name, value in searched.items() if value is not None]):
            raise UserError(f'{", ".join(given)}: only for `policy` "auto", a policy has its own')
        profile = Profile.from_file(hardware) if isinstance(hardware, (str, Path)) else hardware
        limits = dict(overlap=overlap is not False, max_latency=max_latency, min_hh_ratio=min_hh_ratio, losses=losses)
        constraints = Constraints(gpu_batch_size, num_gpu_batches, cpu_cache_compute, prefill_tokens, **limits)
        self.caps = dict(zip(TIERS, (gpu_mem, cpu_mem, disk_mem)))
        check_cpu_cap(self.caps, not cuda, self.policy == "auto")
        self.offload_root = Path(offload_dir) if offload_dir is not None else default_root()
        self.progress = progress
        self.observer = observer or Observer()
        self.choice: ExecutionPlan | None = None
        self.report: dict = {}
        self.expect_len: float | None = None

        choose_dtype = partial(job_dtype, self.device, dtype, profile=profile, compute=compute)
        formats = (compress_weight, self.compress_cache, compute)
        model = with_revision(None if model is None else str(model), revision)
        self.model = load_model(model, path, choose_dtype, progress, *formats, disk_mem)
        self.model.in_blocks = takes_in_blocks(self.model.formats.values(), compute, cuda, in_blocks)
        self.model.chat.set_kwargs(checked_kwargs(chat_template_kwargs))
        self.dtype = self.model.dtype
        self.spec = self.model.spec
        self.tokenizer = self.model.tokenizer
        self.eos_ids = self.model.eos_ids
        if not cuda:
            rowwise.prepare(self.dtype)
            for form in cache_formats(self.compress_cache, self.dtype, self.spec.head_dim):
                prepare_cache(form, self.dtype, self.spec.head_dim, self.position_rolling)
        self.runner = Runner(self.model, self.device, self.offload_root, gpu_mem, progress)
        name = dtype_name(self.dtype)
        how = dict(compute=compute, in_blocks=self.model.in_blocks)
        how |= dict(formats=self.model.formats, dummy=self.model.is_dummy, copy_bytes=self.model.source.copy_bytes)
        data = ModelData.of(self.spec, name, name, cuda, compressed=compress_weight is not None, **how)
        here = (self.device, self.dtype, self.offload_root)
        profiles = (profile or kept_profile(*here), partial(load_or_measure, *here, progress))
        self.planner = Planner({compress_weight: data}, constraints, *profiles, progress)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Free memory, threads and the offload folder once no other call runs; the next `generate` loads them again."""
        if not self.turns.is_forked:  # there they belong to the parent
            self._close()

    @in_turn
    def _close(self) -> None:
        self.runner.close()

    def resources(self) -> Resources:
        """The memory that a job may use now."""
        needed = (self.runner.baseline(), self.device.workspace_bytes)
        return Resources.capped(self.runner.available(), self.caps, self.device.is_cuda, *needed)

    @property
    def position_rolling(self) -> bool:
        """Whether positions roll, so that an output may go on past the model's."""
        return isinstance(self.kv_budget, KVBudget) and self.kv_budget.position_rolling

    def admit(self, prompt: Prompt, gen_len: int) -> list[int]:
        """Token ids of a prompt, if an output of `gen_len` tokens fits behind it.

        Raises:
            UserError: it is too long, or as `LoadedModel.encode`.
        """
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
        workload: Workload | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts; results in the order of the prompts.

        With `on_output` an iterator of prompts is read while others run, some thousand of them at a time, and each
        output leaves by `on_output` alone, as soon as its row has ended: memory does not grow with the job.

        Args:
            prompts: texts, lists of token ids, or conversations, which go through the model's chat template: lists of
                messages, each {"role": "user", "content": "text"} or of another role that the template knows. A history
                may hold content parts of type text, and tool calls, as OpenAI has them.
            sampling_params: for all prompts, or one for each.
            keys: a number below 2**64 for each prompt. Random numbers depend on the seed, the key and the step, and on
                nothing else: with its old key a prompt gets its old text in any job. Default: places in the job.
            skip_errors: a prompt that cannot be run becomes an output with `error` instead of raising.
            on_output: called with every output as soon as its row has ended; not at all if no prompt can be run. What
                it got before an interrupt is what there is.
            longest_prompt: tokens of the longest prompt of an iterator; a KV budget that is a ratio, or "auto", needs
                it. A longer prompt gets an error.
            workload: of an iterator of prompts, the tokens of all of them, and of the longest output.

        Raises:
            UserError: a prompt that cannot be run, as one with stop strings without a tokenizer; parameters or keys
                that are not one for each prompt; or a job for which there is no memory.
        """
        self.report = {}
        if isinstance(prompts, Iterator) and on_output is not None:
            given = (prompts, sampling_params, keys)
            requests = Requests(self.model, each_of(*given), self.position_rolling, skip_errors)
            self._generate_ahead(requests, on_output, workload, longest_prompt)
            return []
        what = "`prompts` must be a text, or a list of texts, lists of token ids and conversations"
        prompts = [prompts] if isinstance(prompts, str) else list_of(what, prompts)
        params = params_of_each(sampling_params, len(prompts))
        keys = keys_of_each(keys, len(prompts))
        requests = Requests(self.model, zip(prompts, params, keys), self.position_rolling, skip_errors)
        rows = list(requests)
        if rows:
            collector = OutputCollector(self.tokenizer, requests.outputs, on_output)
            self._run(rows, workload_of(rows), Sampler(self.eos_ids, self.tokenizer), collector)
        return list(requests.outputs.values())

    def _generate_ahead(
        self,
        requests: Requests,
        on_output: Callable[[RequestOutput], None],
        workload: Workload | None,
        longest_prompt: int | None,
    ) -> None:
        """Read prompts while others run, a window of them at a time."""
        rows = iter(requests)
        if workload is None:
            first = list(islice(rows, WINDOW))
            if not first:
                return
            workload = workload_of(first)
            if len(first) == WINDOW:
                workload = self._planned_for(workload, longest_prompt)
            rows = chain(first, rows)
        requests.limits = (workload.longest, workload.gen_len)
        collector = OutputCollector(self.tokenizer, requests.outputs, on_output, keeps=False)
        self._run(rows, replace(workload, window=WINDOW), Sampler(self.eos_ids, self.tokenizer), collector, requests)

    def _planned_for(self, first: Workload, longest: int | None) -> Workload:
        """Of more prompts than can be read before the job is planned: those that were read stand for all."""
        budget = self.kv_budget
        has_ratio = isinstance(budget, KVBudget) and (budget.hh_ratio, budget.recent_ratio) != (None, None)
        if longest is None and (has_ratio or "auto" in (budget, self.compress_cache)):
            raise UserError(
                "a KV budget that is a ratio, or auto, is of the longest prompt, which an iterator does not tell: give "
                "`longest_prompt`, or the budget in slots"
            )
        longest = first.longest if longest is None else whole_number("`longest_prompt`", longest, 1)
        return replace(first, prompt_lens=(longest, *first.prompt_lens[1:]))

    def chat(
        self,
        conversations: Seq[dict] | Seq[Seq[dict]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        keys: Seq[int] | None = None,
        skip_errors: bool = False,
        on_output: Callable[[RequestOutput], None] | None = None,
        chat_template_kwargs: dict | None = None,
    ) -> list[RequestOutput]:
        """The model's answer to one conversation or to each of several; all else as in `generate`.

        Args:
            chat_template_kwargs: variables of the chat template, such as {"enable_thinking": False}; they win over
                those of the LLM.
        """
        no_messages = "a conversation is a list of messages, one or more, with role and content"
        several = [conversations] if is_conversation(conversations) else list_of(no_messages, conversations)
        variables = checked_kwargs(chat_template_kwargs)
        prompts = [
            Conversation(messages, variables) if is_conversation(messages) else UserError(no_messages)
            for messages in several
        ]
        return self.generate(prompts, sampling_params, keys=keys, skip_errors=skip_errors, on_output=on_output)

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
            prompt_len: tokens of each text that are its prompt: a number for all texts, or one for each. Those behind
                it are fed one by one, so that the KV budget acts as in generation. None reads a whole text in one pass,
                with full attention.
            first_scored: the first token of each text whose log-probability is wanted, counted from 0: by default that
                behind the prompt, or the second one of the text. What texts have in common before it is computed once.
            on_output: called with every output that is scored, as soon as its text has ended.

        Returns:
            In the order of the texts. One that cannot be scored has an `error` and stops no other.

        Raises:
            UserError: `prompt_len` is no whole number from 1 on, or not one for each text, or there is no memory.
        """
        self.report = {}
        what = "`texts` must be a text, or a list of texts and lists of token ids"
        texts = [texts] if isinstance(texts, str) else list_of(what, texts)
        how = (prompt_len, first_scored, self.position_rolling)
        sequences, outputs, targets = to_score(self.model, texts, *how)
        if sequences:
            sink = TeacherForcing(targets)
            workload = workload_of(sequences)
            self._run(sequences, workload, sink, ScoreCollector(outputs, sink.greedy_token_ids, on_output))
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
        """Streams without end over KV caches of a fixed size, placed as the caches of a job are.

        Args:
            kv_budget: slots, by default those of the LLM; without any the caches are full, and end with the model's
                positions.
            count: several streams in one block; the session's methods then take and return lists.
            position_rolling: what a cache holds has the positions 0, 1, 2 ..., so that a stream may outgrow the model's
                (RoPE only). By default with a KV budget.
            chunk: the most tokens that are read at once. All of them see the same held tokens, of which some then go.

        Raises:
            UserError: an argument that cannot be used, positions that cannot roll, or no memory.
        """
        self.runner.end_streams("the next session of its model began")
        self.device.reset_meters()
        given = None if self.policy == "auto" else self.policy
        budget = kv_budget or self.kv_budget
        arguments = self.compress_cache, 1 if count is None else count, position_rolling, chunk
        self.choice, most = choose(self.planner, self.resources(), given, budget, *arguments)
        self.observer.on_plan(self.choice)
        self.choice.plan.check()
        return Session(self.model, self.runner, self.turns, self.choice, count, most)

    def _run(
        self,
        rows: Iterable[Sequence],
        workload: Workload,
        sink: LogitsSink,
        collector: Observer,
        requests: Requests | None = None,
    ) -> None:
        """Take all rows through the engine; `sink` gets the logits. `requests`: whose prompts are read meanwhile."""
        self.runner.end_streams("another job of its model began")
        self.device.reset_meters()
        if workload.mean_len is None:
            workload = replace(workload, mean_len=self.expect_len)
        how = (None if self.policy == "auto" else self.policy, self.kv_budget, self.compress_cache)
        self.choice = choice = self.planner.choose(workload, self.resources(), *how)
        self.observer.on_plan(choice)
        choice.plan.check()
        bar = ProgressBar(workload.output_tokens, len(self.model.layers), self.progress)
        window = max(workload.window or 1 << 62, WINDOW_BLOCKS * choice.policy.block_size)
        observers = Observers(collector, bar, self.observer)
        if requests is not None:
            requests.refused = collector.hand_on
        try:
            self.report = self.runner.run(choice, rows, sink, observers, window).to_dict()
        finally:
            bar.close()


def workload_of(rows: list[Sequence]) -> Workload:
    """Of rows that are all known."""
    path, shared = shared_tokens(rows)
    prompt_lens = sorted((len(s.prompt) for s in rows), reverse=True)
    gen_len = max(s.params.max_tokens for s in rows)
    tokens = sum(s.params.max_tokens for s in rows)
    return Workload(tuple(prompt_lens), gen_len, path=path, shared=shared, output_tokens=tokens)
