"""The Python API: prompts in, text out, with everything between placed by a policy."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from pathlib import Path

import torch
from tqdm import tqdm

from h2o_flexgen import interrupts
from h2o_flexgen.engine.runner import Engine, Sequence, make_batches
from h2o_flexgen.engine.sampling import SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache import CacheRule, rule_for
from h2o_flexgen.models.parts import activation
from h2o_flexgen.models.registry import family, head_name, known_names, named_spec, read_spec, stored_dtype
from h2o_flexgen.models.source import find_model, load_tokenizer
from h2o_flexgen.models.spec import ModelSpec
from h2o_flexgen.offload import memory
from h2o_flexgen.offload.activations import ActivationStore
from h2o_flexgen.offload.checkpoint import Checkpoint
from h2o_flexgen.offload.convert import sweep_conversions
from h2o_flexgen.offload.device import Device
from h2o_flexgen.offload.disk import DiskIO, OffloadFolder, default_root
from h2o_flexgen.offload.kv_store import KVStore
from h2o_flexgen.offload.queues import TransferQueue
from h2o_flexgen.offload.random_weights import DummyCheckpoint
from h2o_flexgen.offload.weights import WeightStore
from h2o_flexgen.planning.budget import MIN_HH_RATIO, BudgetPoint, size_budget
from h2o_flexgen.planning.cost import CostModel, Prediction
from h2o_flexgen.planning.memory import Plan, Shapes, plan_policy
from h2o_flexgen.planning.placement import Placement
from h2o_flexgen.planning.planner import cap_limits, check_cpu_cap
from h2o_flexgen.planning.profile import Profile
from h2o_flexgen.planning.search import Search
from h2o_flexgen.policy import MARGIN, KVBudget, Policy, read_policy
from h2o_flexgen.profiling.kernels import job_dtype
from h2o_flexgen.profiling.measure import load_or_measure
from h2o_flexgen.sizes import KV_BUFFERS, Workload, batch_sizes, micro_tokens

#: sequences computed at once where everything lies in RAM: more make a processor's products no faster
RESIDENT_BATCH = 64
DUMMY = "_DUMMY_"


@dataclass
class CompletionOutput:
    """One generated text. `finish_reason` is "length", "stop", or "abort" (the job was interrupted)."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str

    @property
    def cumulative_logprob(self) -> float:
        return sum(self.logprobs)


@dataclass
class RequestOutput:
    """What became of one prompt; `error` says why it could not be run or broke off, and then there are no outputs."""

    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    error: str | None = None


class LLM:
    """A model that need not fit into memory.

    Args:
        model: folder, Hugging Face name, or None for the demo model.
        policy: a Policy, the path of one as JSON, or "auto": everything on the compute device if the model and a batch
            of up to 64 prompts fit; else, or with `max_latency`, or on CUDA with more prompts than one batch, the
            policy that the search finds fastest on this machine, which is measured once (under a minute).
        kv_budget: slots for heavy hitters and recent tokens; None keeps the full cache; "auto" takes the largest
            budget that costs no throughput (see `search.budget`).
        device: "auto", "cpu", "cuda", "cuda:N".
        dtype: a float type's name, or "auto": on CUDA fp16, or bf16 for a checkpoint in bf16 where the GPU has it; on
            the CPU the type whose matmuls are the fastest, by measuring (`kernels.rates`).
        path: folder of the weights if it is not `model`'s; "_DUMMY_" for random weights of the named size.
        offload_dir: where cache, activations and random weights on disk go, in a private folder of its own.
        gpu_mem, cpu_mem, disk_mem: the most bytes to use of a tier (default: what there is).
        gpu_batch_size, num_gpu_batches, overlap, cpu_cache_compute: given ones are not searched by policy "auto".
        hardware: a profile as `python -m h2o_flexgen.hardware` writes it, instead of measuring.
        max_latency: the most seconds that a block may take, for policy "auto".
        min_hh_ratio: the floor of kv_budget "auto".
        progress: show bars on stderr.
        on_plan: called with the policy and the memory plan of a job before anything is allocated.

    Raises:
        UserError: whatever of this cannot be used, with what to do about it.
    """

    def __init__(
        self,
        model: str | None = None,
        policy: Policy | str = "auto",
        kv_budget: KVBudget | str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        *,
        path: str | None = None,
        offload_dir: str | Path | None = None,
        gpu_mem: int | None = None,
        cpu_mem: int | None = None,
        disk_mem: int | None = None,
        gpu_batch_size: int | None = None,
        num_gpu_batches: int | None = None,
        overlap: bool | None = None,
        cpu_cache_compute: bool | None = None,
        hardware: str | Path | Profile | None = None,
        max_latency: float | None = None,
        min_hh_ratio: float = MIN_HH_RATIO,
        progress: bool = True,
        on_plan: Callable[[Policy, Plan], None] | None = None,
    ):
        self.model_name = model or (path if path not in (None, DUMMY) else "demo_model")
        self.device = Device(device)
        if dtype != "auto":
            self.device.dtype(dtype)  # raises for one that is not known
        self.kv_budget = kv_budget
        self.policy = policy
        if isinstance(policy, (str, Path)) and policy != "auto":
            self.policy, budget = read_policy(policy)
            self.kv_budget = budget if kv_budget is None else kv_budget
        if not isinstance(self.policy, Policy) and self.policy != "auto":
            raise UserError(f'policy must be a Policy, a file or "auto", not {policy!r}')
        if kv_budget not in (None, "auto") and not isinstance(kv_budget, KVBudget):
            raise UserError(
                f'kv_budget must be a KVBudget, such as KVBudget.from_ratio(0.2), or "auto", not {kv_budget!r}'
            )
        self._auto = (gpu_batch_size, num_gpu_batches, overlap is not False, cpu_cache_compute)
        searched = (gpu_batch_size, num_gpu_batches, overlap, cpu_cache_compute, max_latency)
        if self.policy != "auto" and any(x is not None for x in searched):
            raise UserError(
                'batch sizes, overlap, cpu_cache_compute and max_latency are for policy "auto": a policy has its own'
            )
        self.profile = Profile.from_file(hardware) if isinstance(hardware, (str, Path)) else hardware
        if max_latency is not None and not max_latency > 0:
            raise UserError(f"max_latency must be more than 0 s, not {max_latency}")
        self.max_latency, self.min_hh_ratio = max_latency, min_hh_ratio
        self.curve: list[BudgetPoint] = []
        self._caps = {"gpu": gpu_mem, "cpu": cpu_mem, "disk": disk_mem}
        check_cpu_cap(self._caps, not self.device.is_cuda, self.policy == "auto")
        self.offload_root = Path(offload_dir) if offload_dir is not None else default_root()
        OffloadFolder.sweep(self.offload_root)  # before free space is counted
        sweep_conversions()
        self.progress = progress
        self.on_plan = on_plan
        self.direct_reads = True  # weights past the page cache: docs/benchmarks/disk.json
        self.report: dict = {}
        self.plan: Plan | None = None

        if path == DUMMY:
            self.tokenizer = None
            self.spec, stored = self._dummy_spec(model), None
        else:
            folder, home = find_model(model, path)
            self.spec, stored = read_spec(home), stored_dtype(home)
            self.tokenizer = load_tokenizer(home)
        kernels = self.profile and self.profile.kernels
        self.dtype = job_dtype(self.device, dtype, stored and getattr(torch, stored), kernels)
        self._check_profile()
        activation(self.spec.activation)  # raises for one that is not known
        self.layers = family(self.spec.model_type).tensors(self.spec)
        needed = {name: shape for layer in self.layers for name, shape in layer.shapes.items()}
        if path == DUMMY:
            self.source = DummyCheckpoint(needed, self.dtype)
        else:
            self.source = Checkpoint(folder, progress)
        self.source.check(needed)
        if self.spec.tied and path != DUMMY:
            self.source.check_tied(*(head_name(replace(self.spec, tied=tied)) for tied in (True, False)))
        # vectors never stream
        self._stored_dtypes = {self.source.stored_dtype(name) for name, shape in needed.items() if len(shape) > 1}
        self.eos_ids = frozenset() if path == DUMMY else self.spec.eos

        if self.device.is_cuda:
            self.device.start(gpu_mem)
        memory.hold_heap()
        self._at_start = self._baseline = memory.baseline()
        self.folder: OffloadFolder | None = None
        self._io: DiskIO | None = None
        self._queues: dict[str, TransferQueue] = {}
        self._weights: WeightStore | None = None
        self._weights_key = None

    def _check_profile(self) -> None:
        """Raises UserError for a hardware profile of another device or type."""
        job = (self.device.torch_device.type, str(self.dtype).removeprefix("torch."))
        if self.profile is not None and (self.profile.device, self.profile.dtype) != job:
            raise UserError(
                f"the hardware profile is of {self.profile.dtype} on {self.profile.device}, this job computes in "
                f"{job[1]} on {job[0]}: measure again, or name another --device or --dtype"
            )

    @staticmethod
    def _dummy_spec(model: str | None) -> ModelSpec:
        spec = named_spec(model or "")
        if spec is None and model and os.path.isdir(model):
            spec = read_spec(Path(model))
        if spec is None:
            raise UserError(
                f"random weights ({DUMMY}) need a folder with a config.json, or the name of a model whose sizes are "
                f"built in, not {model!r}: {', '.join(known_names())}"
            )
        return spec

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Give memory, threads and the offload folder back; the next `generate` starts anew."""
        for lane in self._queues.values():
            lane.close()
        if self._io is not None:
            self._io.close()
        self._weights = self._weights_key = None
        self._io = None
        self._queues = {}
        self.device.unpin()
        self.device.release_cached()
        if self.folder is not None:
            self.folder.close()
            self.folder = None

    # prompts

    def encode(self, prompt: str | Seq[int]) -> list[int]:
        """Token ids of a prompt that can be run. A UserError stands for a prompt that could not be read.

        Raises:
            UserError: empty, of a wrong type, no tokenizer for text, or an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("this model has no tokenizer: give prompt_token_ids instead of text")
            if not prompt:
                raise UserError("the prompt is empty")
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise UserError("the prompt is not valid Unicode: it holds half a surrogate pair") from None
            ids = self.tokenizer(prompt, verbose=False)["input_ids"]
        elif isinstance(prompt, (list, tuple)):
            ids = list(prompt)
        elif isinstance(prompt, UserError):
            raise prompt
        else:
            raise UserError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")
        if not ids:
            raise UserError("the prompt is empty")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, Integral):  # numpy's are welcome
                raise UserError(f"token ids are whole numbers, not {token!r}")
            if not 0 <= token < self.spec.vocab:
                raise UserError(f"token id {token} is outside the vocabulary of {self.spec.vocab}")
        return list(map(int, ids))

    def admit(self, prompt: str | Seq[int], gen_len: int) -> list[int]:
        """Token ids of a prompt, if an output of `gen_len` tokens fits behind it; else a UserError."""
        ids = self.encode(prompt)
        self.check_length(len(ids), gen_len)
        return ids

    def check_length(self, prompt_len: int, gen_len: int) -> None:
        """Raises UserError unless the model has positions for a prompt and an output of these lengths."""
        self.spec.check_length(prompt_len, gen_len)

    # the job

    def generate(
        self,
        prompts: str | Seq[str | Seq[int]],
        sampling_params: SamplingParams | None = None,
        *,
        skip_errors: bool = False,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts, in blocks of prompts of like length; results in the order of the prompts.

        Args:
            prompts: texts, or lists of token ids.
            skip_errors: a prompt that cannot be run becomes an output with `error` instead of raising.
            on_output: called with every finished output as soon as its batch is done, and on an interrupt with
                what there is of the block that was running ("abort"); not at all if no prompt can be run. One that an
                interrupt hits gets the same output again.

        Raises:
            UserError: a prompt that cannot be run, or a job for which there is no memory.
        """
        params = sampling_params or SamplingParams()
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        self.report, self.curve = {}, []
        outputs: dict[int, RequestOutput] = {}
        sequences = []
        for index, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else None
            try:
                ids = self.admit(prompt, params.max_tokens)
            except UserError as e:
                if not skip_errors:
                    raise UserError(f"prompt {index}: {e}") from None
                outputs[index] = RequestOutput(index, text, [], error=str(e))
                continue
            sequences.append(Sequence(index, ids))
            outputs[index] = RequestOutput(index, text, ids)
        if sequences:
            try:
                self._run(sequences, params, outputs, on_output)
            except torch.OutOfMemoryError as e:
                self.close()
                traceback.clear_frames(e.__traceback__)
                raise UserError(
                    f"CUDA is out of memory, though the plan fits: give a smaller --gpu-mem if other programs use the "
                    f"card; if not, its memory is in pieces too small to use: give smaller batches; {e}"
                ) from None
        return [outputs[index] for index in range(len(prompts))]

    def _run(self, sequences, params: SamplingParams, outputs, on_output) -> None:
        # longest first: what does not fit shows at once, and neighbours are alike in length
        sequences.sort(key=lambda s: -len(s.prompt))
        workload = Workload(tuple(len(s.prompt) for s in sequences), params.max_tokens)
        self.device.reset_peaks()
        self.device.reset_stalls()
        rule, policy, placement, plan = self.choose(workload)
        self.plan = plan
        if self.on_plan is not None:
            self.on_plan(policy, plan)
        plan.check()
        size = policy.block_size
        blocks = [sequences[at : at + size] for at in range(0, len(sequences), size)]
        done: set[int] = set()

        def emit(block: list[Sequence], aborted: bool = False) -> None:
            for s in block:
                broken = s.finish_reason == "error"
                if s.index in done or (aborted and not s.tokens and not broken):
                    continue
                if broken:
                    outputs[s.index].error = "the model's numbers overflowed for this prompt"
                else:
                    outputs[s.index].outputs = [self._completion(s)]
                if on_output is not None:
                    on_output(outputs[s.index])
                done.add(s.index)  # an interrupt until here must not lose it

        current: list[Sequence] = []
        bar = engine = None
        try:
            with interrupts.deferred():
                self._open(policy)
                weights = self._load_weights(policy, placement)
                pinned = self.device.pinned_count()
                caches, activations = self._stores(policy, placement, rule, workload)
                total = len(sequences) * params.max_tokens
                bar = tqdm(total=total, unit="tok", desc="generating", disable=not self.progress, smoothing=0.1)
                engine = Engine(
                    self.spec,
                    self.device,
                    self.dtype,
                    rule,
                    weights,
                    caches,
                    activations,
                    params,
                    self.eos_ids,
                    plan.ram,
                )
                before = self._moved(None, None)
                for output in outputs.values():
                    if output.error is not None and on_output is not None:
                        on_output(output)
                engine.on_finished = lambda finished: emit([s for s in finished if s.finish_reason != "error"])
                for n, current in enumerate(blocks):
                    engine.on_progress = self._progress(bar, n, len(blocks))
                    batches = make_batches(current, policy.gpu_batch_size, policy.prefill_tokens)
                    engine.run(batches, is_last=n + 1 == len(blocks))
                    if n == 0 and all(s.finish_reason == "error" for s in current):
                        engine.explain_broken(whole_job=len(blocks) == 1)
                    emit(current)
                    bar.total -= sum(params.max_tokens - len(s.tokens) for s in current)  # stopped early
                    bar.refresh()
                self.report = self._report(policy, placement, rule, workload, params, sequences, engine, before)
        except BaseException as e:
            for s in current:
                s.finish_reason = s.finish_reason or "abort"
            try:
                if not isinstance(e, Exception):
                    emit(current, aborted=True)
            finally:
                self.close()
                # who keeps the exception, as an interactive session does, must not keep weights and cache
                if engine is not None:  # a callback that raised has it in its traceback
                    engine.weights = engine.caches = engine.activations = None
                weights = caches = activations = engine = None
                if not isinstance(e, Exception) or isinstance(e, UserError):
                    traceback.clear_frames(e.__traceback__)
            raise
        finally:
            if bar is not None:
                bar.close()
        # cache and activations are of this job alone; weights stay for the next
        for store in (caches, activations):
            if store.file is not None:
                store.file.close()
                store.file.path.unlink(missing_ok=True)
        self.device.unpin(pinned)

    def _completion(self, s: Sequence) -> CompletionOutput:
        text = ""
        if self.tokenizer is not None:
            # code has blanks before brackets and dots that a clean-up would take away
            text = self.tokenizer.decode(s.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return CompletionOutput(0, text, s.tokens, s.logprobs, s.finish_reason)

    def _progress(self, bar: tqdm, block: int, blocks: int) -> Callable[[int, int, int], None]:
        layers = len(self.layers)

        def show(i: int, j: int, tokens: int) -> None:
            where = f"prefill {j + 1}/{layers}" if i == 0 else f"token {i + 1}"
            bar.set_postfix_str(f"block {block + 1}/{blocks} {where}", refresh=i == 0)
            if tokens:
                bar.update(tokens)

        return show

    # policy and plan

    def _rule(self, workload: Workload, budget: KVBudget | None) -> CacheRule:
        return rule_for(budget, workload.longest, self.spec.positions)

    def _count_shapes(self, workload: Workload, rule: CacheRule) -> Shapes:
        return Shapes.of(
            self.spec,
            self.layers,
            rule,
            workload,
            compute_itemsize=self.dtype.itemsize,
            stored_itemsize=max(dtype.itemsize for dtype in self._stored_dtypes),
            converts=self._stored_dtypes != {self.dtype},
            cuda=self.device.is_cuda,
            bf16=self.dtype == torch.bfloat16,
            dummy=isinstance(self.source, DummyCheckpoint),
        )

    def limits(self) -> dict[str, int]:
        """Bytes that may be planned for on each tier ("ram": gpu and cpu together where they are one)."""
        ram = int(MARGIN * memory.ram_in_all())
        if self.device.is_cuda:
            weights = 0 if self._weights is None else self._weights.held_bytes(cuda=True)
            room = self.device.free_bytes() + self.device.workspace_bytes + weights
            found = {"gpu": int(MARGIN * room), "cpu": ram}
        else:
            found = {"gpu": ram, "cpu": ram}
        found["disk"] = int(MARGIN * memory.disk_free(self.offload_root))
        if self._weights is not None and self.folder is not None:
            found["disk"] += self.folder.size()
        return cap_limits(found, self._caps, shared=not self.device.is_cuda)

    def _beside_the_weights(self) -> int:
        """Bytes of RAM that this process holds now whatever it computes: prompts too, and other models. Not less than
        at the start: some of the weights may not be resident (swapped, or never touched)."""
        weights = self._weights
        now = memory.baseline() if weights is None else memory.held() - weights.held_bytes(cuda=False)
        return max(self._at_start, now)

    def plan_for(self, policy: Policy, workload: Workload, rule: CacheRule, limits=None) -> tuple[Placement, Plan]:
        """Where everything goes under a policy, and the bytes it takes."""
        shapes = self._count_shapes(workload, rule)
        workspace = self.device.workspace_bytes
        return plan_policy(policy, shapes, workload, limits or self.limits(), self._baseline, workspace)

    def choose(self, workload: Workload) -> tuple[CacheRule, Policy, Placement, Plan]:
        """What a job will run with: its cache rule and policy, searched for where they are "auto"."""
        limits = self.limits()
        self._baseline = self._beside_the_weights()

        def find(ratio: float | None, budget: KVBudget | None) -> tuple[BudgetPoint, tuple]:
            rule = self._rule(workload, budget)
            policy, placement, plan = self.choose_policy(workload, rule, limits)
            plan.check()
            speed = self.predict(policy, placement, workload, rule).tokens_per_s
            point = BudgetPoint.of(ratio, self._count_shapes(workload, rule), policy, speed)
            return point, (rule, policy, placement, plan)

        if self.kv_budget == "auto":
            self.measured()
            _, chosen, self.curve = size_budget(
                self.min_hh_ratio, workload.longest, workload.longest + workload.gen_len, find, self.progress
            )
            return chosen
        rule = self._rule(workload, self.kv_budget)
        return rule, *self.choose_policy(workload, rule, limits)

    def choose_policy(self, workload: Workload, rule: CacheRule, limits=None) -> tuple[Policy, Placement, Plan]:
        """The given policy; or everything on the compute device, if there is room for it and nothing to decide; or what
        the search finds fastest."""
        limits = limits or self.limits()
        if isinstance(self.policy, Policy):
            return self.policy, *self.plan_for(self.policy, workload, rule, limits)
        batch_size, num_batches, overlap, cpu_compute = self._auto
        N = len(workload.prompt_lens)
        size = batch_size or min(RESIDENT_BATCH, N)
        policy = Policy(size, num_batches or 1, overlap=overlap, cpu_cache_compute=bool(cpu_compute))
        placement, plan = self.plan_for(policy, workload, rule, limits)
        larger_pays = self.device.is_cuda and batch_size is None and N > size
        if plan.shortfall() is not None or self.max_latency is not None or larger_pays:
            search = self.search(workload, rule, limits)
            found = search.best(batch_size, num_batches, cpu_compute, overlap)
            policy = found.policy
            placement, plan = self.plan_for(policy, workload, rule, limits)
        return policy, placement, plan

    def search(self, workload: Workload, rule: CacheRule, limits: dict[str, int]) -> Search:
        """The policy search for a job on this machine, which is measured if it has not been."""
        shapes = self._count_shapes(workload, rule)
        workspace = self.device.workspace_bytes
        return Search(self.measured(), shapes, workload, limits, self._baseline, workspace, self.max_latency)

    def measured(self) -> Profile:
        """The profile of this machine; measured now if it never was."""
        if self.profile is None:
            self.profile = load_or_measure(self.device, self.dtype, self.offload_root, self.progress)
        return self.profile

    def predict(self, policy: Policy, placement: Placement, workload: Workload, rule: CacheRule) -> Prediction | None:
        """The times of a job, if this machine has been measured."""
        if self.profile is None:
            return None
        return CostModel(self.profile, self._count_shapes(workload, rule), workload).predict(policy, placement)

    # stores

    def _open(self, policy: Policy) -> None:
        if self._queues and self._queues["weights"].overlap != policy.overlap:
            self.close()
        if self._io is None:
            self._io = DiskIO()
            workers = {"weights": 1, "cache": KV_BUFFERS, "activations": 1, "store": 1}
            self._queues = {name: TransferQueue(self.device, name, policy.overlap, n) for name, n in workers.items()}

    def _make_file(self, name: str, nbytes: int):
        if self.folder is None:
            self.folder = OffloadFolder(self.offload_root)
        return self.folder.file(name, nbytes)

    def _load_weights(self, policy: Policy, placement: Placement) -> WeightStore:
        key = tuple(sorted(placement.weights.items()))
        if key != self._weights_key:
            if self._weights is not None:
                self.close()
                self._open(policy)
            self._weights = WeightStore(
                self.device,
                self.dtype,
                [layer.streamed for layer in self.layers],
                {short: spec for layer in self.layers for short, spec in layer.gathered.items()},
                placement.weights,
                self.source,
                self._io,
                self._queues["weights"],
                self._make_file,
                self.direct_reads,
                self.progress,
            )
            self._weights_key = key
        return self._weights

    def _stores(self, policy: Policy, placement: Placement, rule: CacheRule, workload: Workload):
        spec, size = self.spec, self.dtype.itemsize
        sizes = batch_sizes(len(workload.prompt_lens), policy)
        layouts = [rule.layout(spec, self.dtype, b, workload.longest, workload.gen_len) for b in sizes]
        self._io.large_prefetches = "disk" not in placement.cache.values()
        caches = KVStore(
            self.device,
            layouts,
            placement.cache,
            self._io,
            self._queues["cache"],
            self._queues["store"],
            self._make_file,
            policy.cpu_cache_compute,
        )
        row = spec.hidden * size
        longest = workload.longest
        piece = micro_tokens(policy, longest, sizes[0]) * row
        activations = ActivationStore(
            self.device,
            placement.activations,
            [b * longest * row for b in sizes],
            piece,
            self._io,
            self._queues["activations"],
            self._queues["store"],
            self._make_file,
        )
        return caches, activations

    # the report

    def _moved(self, caches, activations) -> dict[str, int]:
        moved = {
            "disk_to_cpu": self._io.read_bytes,
            "cpu_to_gpu": self._weights.cpu_to_gpu_bytes,
            "gpu_to_cpu": 0,
            "cpu_to_disk": self._io.written_bytes,
        }
        for store in (caches, activations):
            if store is not None:
                moved["cpu_to_gpu"] += store.cpu_to_gpu_bytes
                moved["gpu_to_cpu"] += store.gpu_to_cpu_bytes
        return moved

    def _report(self, policy, placement, rule, workload, params, sequences, engine: Engine, before: dict) -> dict:
        generated = sum(len(s.tokens) for s in sequences)
        first = sum(1 for s in sequences if s.tokens)
        prefill, decode = engine.seconds["prefill"], engine.seconds["decode"]
        prompt_tokens = sum(workload.prompt_lens)
        moved = self._moved(engine.caches, engine.activations)
        stalls = self.device.stall_seconds
        ram = memory.peak_resident()
        cpu_pool = self.plan.needed("cpu")
        disk = self.folder.size() if self.folder else 0
        peak = (
            {"gpu": self.device.peak_bytes(), "cpu": ram, "disk": disk}
            if self.device.is_cuda
            else {"gpu": max(0, ram - cpu_pool), "cpu": cpu_pool, "disk": disk}
        )
        prediction = self.predict(policy, placement, workload, rule)
        return {
            "model": self.model_name,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "workload": {
                "num_prompts": len(sequences),
                "prompt_len": workload.longest,
                "gen_len": params.max_tokens,
            },
            "policy": asdict(policy),
            "kv_budget": {"heavy": rule.heavy, "recent": rule.recent} if rule.scored else None,
            "prefill": {"seconds": prefill, "tokens_per_s": prompt_tokens / prefill if prefill else 0.0},
            "decode": {"seconds": decode, "tokens_per_s": (generated - first) / decode if decode else 0.0},
            "total": {
                "seconds": prefill + decode,
                "generated_tokens": generated,
                "tokens_per_s": generated / (prefill + decode),
            },
            "peak_memory_bytes": peak,
            "planned_memory_bytes": {tier: self.plan.needed(tier) for tier in ("gpu", "cpu", "disk")},
            "bytes_moved": {key: moved[key] - before[key] for key in moved},
            # activations go home on the cache's lane
            "stall_seconds": {
                "weights": stalls.get("weights", 0.0),
                "cache": stalls.get("cache", 0.0) + stalls.get("activations", 0.0),
            },
            **({} if prediction is None else {"predicted": prediction.of_job()}),
        }
