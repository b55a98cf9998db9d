"""The options of a job, resolved once into plain data, and the planner they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from numbers import Real
from pathlib import Path
from typing import NamedTuple

from h2o_flexgen.engine.messages import checked_kwargs
from h2o_flexgen.engine.model import LoadedModel, load_model, prepare_cpu_loops
from h2o_flexgen.engine.observer import Observer
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats import Format, dtype_name
from h2o_flexgen.formats.forms import experts_of
from h2o_flexgen.kernels.int8 import takes_blocks
from h2o_flexgen.kernels.linear import int8_operands
from h2o_flexgen.machine import memory
from h2o_flexgen.machine.device import Device
from h2o_flexgen.machine.profile import Profile
from h2o_flexgen.models.registry import family
from h2o_flexgen.models.repository import with_revision
from h2o_flexgen.models.spec import ModelSpec, shapes_of
from h2o_flexgen.planning.budget import MIN_HH_RATIO
from h2o_flexgen.planning.constraints import Constraints
from h2o_flexgen.planning.losses import Losses
from h2o_flexgen.planning.planner import Planner
from h2o_flexgen.planning.shapes import ModelData
from h2o_flexgen.policy import LIMITS, SEARCHED, KVBudget, Policy, given_policy
from h2o_flexgen.profiling.measure import job_dtype, kept_profile, load_or_measure
from h2o_flexgen.storage.disk import default_root

#: options that only policy "auto" takes
AUTO = (*SEARCHED, "max_latency")
#: the fraction of memory that codes of 8 bits may take
MOST_CODES = 0.7


@dataclass
class EngineArgs:
    """The options of `LLM`. Once it is made, files have been read and defaults filled in.

    Attributes:
        model: folder, Hugging Face name, or None for the demo model.
        policy: a Policy, the path of one as JSON, or "auto": everything on the compute device if the model and a batch
            of up to 128 prompts fit; else, or with `max_latency`, or on CUDA with more prompts than one batch, the
            policy that the search finds fastest on this machine, which is measured once (about a minute).
        kv_budget: slots for heavy hitters and recent tokens; None keeps the full cache; "auto" takes the largest
            budget that costs no throughput (see `planning.budget`).
        device: "auto", "cpu", "cuda", "cuda:N", or several as "cuda:0,cuda:1", among which the layers are divided.
        dtype: a float type's name, or "auto": on CUDA fp16, or bf16 for a checkpoint in bf16 where the GPU has it; on
            the CPU the type with the fastest matmuls, as measured (`kernels.linear`).
        revision: branch, tag or commit of a repository on the hub; the same as `model` "NAME@REVISION".
        path: folder of the weights if it is not `model`'s; "_DUMMY_" for random weights of the named size.
        compress_weight: "int8" or "int4" quantises matrices, once, into a copy in the cache folder
            (`formats.forms.compressed`); None uses them as stored in the checkpoint.
        compress_cache: "int8" or "int4" quantises cached K and V, one token at a time (`formats.forms.cache_format`);
            None caches them in the compute dtype; "auto" picks the format with the least loss that costs no
            throughput.
        compute: "exact" decodes quantised matrices to floats for their matmuls; "int8" multiplies them in int8
            (`kernels.int8`), which is faster and costs a little quality. None: what a policy file says, else "exact".
        in_blocks: with "int8", whether blocks of up to 6 bits are multiplied as stored; None: where this CPU gains.
        operands: with "int8", the same for each format, as in the manifest of a job.
        offload_dir: folder for the cache, hidden states and random weights on disk, in unnamed files.
        mem: the most bytes of RAM to use in all, for the process, the weights and everything else (default: all that is
            free); with CUDA, of the host's RAM. `gpu_mem` or `cpu_mem` may set tighter limits.
        gpu_mem, cpu_mem, disk_mem: the most bytes to use of a tier (default: all that is free); of several devices a
            `gpu_mem` for each, or one that holds for each.
        gpu_batch_size, num_gpu_batches, prefill_tokens, overlap, cpu_cache_compute: policy "auto" does not search those
            that are given.
        hardware: a profile, or the path of one that `h2o-flexgen hardware` wrote, instead of measuring.
        max_latency: the most seconds that a block may take, for policy "auto".
        min_hh_ratio: the floor of kv_budget "auto".
        losses: measured quality losses of budgets; kv_budget "auto" stays within their `max_loss`.
        chat_template_kwargs: variables of the model's chat template, such as {"enable_thinking": False}.
        progress: show bars on stderr.
        observer: is notified of the policy, and of passes, layers and finished rows as the job runs.

    Raises:
        UserError: an option that cannot be used, with what to do about it.
    """

    model: str | Path | None = None
    policy: Policy | str | Path = "auto"
    kv_budget: KVBudget | str | None = None
    device: str = "auto"
    dtype: str = "auto"
    revision: str | None = None
    path: str | None = None
    compress_weight: str | None = None
    compress_cache: str | None = None
    compute: str | None = None
    in_blocks: bool | None = None
    operands: dict[str, str] | None = None
    offload_dir: str | Path | None = None
    mem: int | None = None
    gpu_mem: int | Sequence[int] | None = None
    cpu_mem: int | None = None
    disk_mem: int | None = None
    gpu_batch_size: int | None = None
    num_gpu_batches: int | None = None
    prefill_tokens: int | None = None
    overlap: bool | None = None
    cpu_cache_compute: bool | None = None
    hardware: str | Path | Profile | None = None
    max_latency: float | None = None
    min_hh_ratio: float = MIN_HH_RATIO
    losses: Losses | None = None
    chat_template_kwargs: dict | None = None
    progress: bool = True
    observer: Observer | None = None

    def __post_init__(self):
        settings = given_policy(self.policy, self.kv_budget, self.compress_cache, self.compress_weight, self.compute)
        for name, value in settings._asdict().items():
            setattr(self, name, value)
        searched = {name: getattr(self, name) for name in AUTO if getattr(self, name) is not None}
        if self.policy != "auto" and searched:
            names = ", ".join(f"`{name}`" for name in searched)
            raise UserError(f'{names}: only for `policy` "auto", a policy has its own')
        if isinstance(self.hardware, (str, Path)):
            self.hardware = Profile.from_file(self.hardware)
        self.constraints = Constraints(**searched, min_hh_ratio=self.min_hh_ratio, losses=self.losses)
        given = self.device if isinstance(self.device, (list, tuple)) else str(self.device).split(",")
        self.device_names = [str(name).strip() for name in given]
        self.caps = {tier: getattr(self, name) for tier, name in LIMITS.items()}
        self.caps["gpu"] = of_each_device(self.gpu_mem, len(self.device_names))
        for tier, limit in self.caps.items():
            for each in limit if tier == "gpu" else [limit]:
                if each is not None and not (isinstance(each, Real) and 0 <= each < inf):
                    raise UserError(f"`{LIMITS[tier]}` must be a number of bytes, not {each!r:.60}")
        self.model = with_revision(None if self.model is None else str(self.model), self.revision)
        self.offload_dir = default_root() if self.offload_dir is None else Path(self.offload_dir)
        self.chat_template_kwargs = checked_kwargs(self.chat_template_kwargs)
        self.observer = self.observer or Observer()

    def operands_of(self, spec: ModelSpec, formats: dict[str, Format], cuda: bool) -> dict[str, str] | None:
        """What int8 matmuls read of a model with matrices in these formats; None if matmuls are exact. Raises UserError
        if that is weights as stored, and this CPU cannot."""
        asked = self.in_blocks if self.operands is None else self.operands
        if self.compute != "int8":
            return None
        experts = [form for name, form in formats.items() if experts_of(name)[1]]
        if asked is None and takes_blocks() and self._lacks_room(spec, formats):
            asked = True
        return int8_operands(formats.values(), cuda, asked) | int8_operands(experts, cuda, asked, of_experts=True)

    def _lacks_room(self, spec: ModelSpec, formats: dict[str, Format]) -> bool:
        """Whether codes of 8 bits of all quantised matrices would leave little memory for the cache, or not fit: then
        they would be made again for each use, which takes longer than a matmul of a few hundred rows."""
        shapes = shapes_of(family(spec.model_type).tensors(spec))
        codes = sum(prod(shapes[name]) for name, form in formats.items() if not form.is_dense)
        found = self.hardware.memory["gpu"] if isinstance(self.hardware, Profile) else memory.ram_in_all()
        on_devices = None if None in self.caps["gpu"] else sum(self.caps["gpu"])
        limits = [limit for limit in (on_devices, self.caps["ram"], found) if limit is not None]
        return codes > MOST_CODES * min(limits)

    def check_caps(self, cuda: bool) -> None:
        """Raises UserError for a limit that does nothing: without CUDA a search never uses the cpu tier."""
        if self.policy == "auto" and not cuda and self.cpu_mem is not None:
            raise UserError(
                "`cpu_mem` does nothing here: without CUDA use `mem`; the cpu tier is a second pool in RAM, for a "
                "policy with cpu percentages (`percent`)"
            )


def of_each_device(gpu_mem, count: int) -> list:
    """The limit of each of `count` devices. Raises UserError unless there is one for all, or one for each."""
    if not isinstance(gpu_mem, (list, tuple)):
        return [gpu_mem] * count
    if len(gpu_mem) != count:
        raise UserError(f"`gpu_mem` has {len(gpu_mem)} numbers, `device` {count}: give one for all, or one for each")
    return list(gpu_mem)


class StoredModel(NamedTuple):
    """A checkpoint as the planner counts it."""

    spec: ModelSpec
    dtype: str  # name of the type of matrices that `formats` does not name
    formats: dict[str, Format]  # of matrices, by name
    is_dummy: bool  # the weights are random, and written to disk first
    copy_bytes: int = 0  # of the copy that `compress_weight` makes in the cache folder


def load(args: EngineArgs, device: Device) -> LoadedModel:
    """Find the model of a job; its weights are not read yet. Raises UserError as `load_model` and `job_dtype`, or for a
    memory limit that does nothing on this device."""
    if args.dtype != "auto":
        device.dtype(args.dtype)  # raises for one that is not known
    args.check_caps(device.is_cuda)
    model = load_model(
        args.model,
        args.path,
        partial(job_dtype, device, args.dtype, profile=args.hardware, compute=args.compute),
        args.progress,
        compress_weight=args.compress_weight,
        compress_cache=args.compress_cache,
        compute=args.compute,
        disk_mem=args.disk_mem,
    )
    model.operands = args.operands_of(model.spec, model.formats, device.is_cuda)
    model.chat.set_kwargs(args.chat_template_kwargs)
    if not device.is_cuda:
        rolling = isinstance(args.kv_budget, KVBudget) and args.kv_budget.position_rolling
        prepare_cpu_loops(model, args.compress_cache, rolling)
    return model


def job_planner(args: EngineArgs, model: LoadedModel, device: Device) -> Planner:
    """The planner of a model's jobs on this machine, which is measured when the planner first needs its rates."""
    machine = (device, model.dtype, args.offload_dir)
    profile = args.hardware or kept_profile(*machine)
    dtype = dtype_name(model.dtype)
    stored = StoredModel(model.spec, dtype, model.formats, model.is_dummy, model.source.copy_bytes)
    measure = partial(load_or_measure, *machine, args.progress)
    return planner_of(args, {args.compress_weight: stored}, dtype, device.is_cuda, profile, measure)


def planner_of(
    args: EngineArgs,
    models: dict[str | None, StoredModel],
    dtype: str,
    cuda: bool,
    profile: Profile | None,
    measure: Callable[[], Profile] | None = None,
) -> Planner:
    """The planner for a job that runs now, or one that is only asked about.

    Args:
        models: the model under each `compress_weight` that may be chosen.
        dtype: name of the type of the computation.
        profile, measure: as for `Planner`.

    Raises:
        UserError: as `EngineArgs.operands_of`.
    """
    counted = {
        kind: ModelData.of(
            model.spec,
            dtype,
            model.dtype,
            cuda,
            dummy=model.is_dummy,
            formats=model.formats,
            copy_bytes=model.copy_bytes,
            operands=args.operands_of(model.spec, model.formats, cuda),
            decodes=kind is None,
        )
        for kind, model in models.items()
    }
    return Planner(counted, args.constraints, profile, measure, args.progress)
