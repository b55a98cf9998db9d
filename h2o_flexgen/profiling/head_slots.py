"""The slots of each KV head in a job: measured the first time that a model meets a rule, and kept."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from dataclasses import asdict, replace
from functools import cached_property
from math import inf
from pathlib import Path
from zlib import crc32

from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.errors import UserError
from h2o_flexgen.kv_cache import head_losses, option_layers, rule_for
from h2o_flexgen.kv_cache.layers import HeadLosses
from h2o_flexgen.models.inspect import Found
from h2o_flexgen.planning.workload import Workload
from h2o_flexgen.policy import GIB, KVBudget
from h2o_flexgen.profiling import calibration, windows
from h2o_flexgen.profiling.layer_model import LayerModel
from h2o_flexgen.profiling.machine import keep
from h2o_flexgen.utils.files import cache_folder, read_json

#: version of the kept files: with another one everything is measured again
FORMAT = 2
#: passages of the built-in text, and tokens of each
WINDOWS = 2
WINDOW = 1024
#: fewer slots than this are the same in all heads
LEAST_SLOTS = 24
#: measuring may take this long, or this fraction of the job
MOST_SECONDS = 60
MOST_OF_JOB = 0.02

log = logging.getLogger(__name__)


class KnownHeadSlots:
    """Shares out the slots of KV budgets among the KV heads of a model, as far as earlier jobs have measured them.

    Args:
        model: whose weights need not have been found.
    """

    def __init__(self, model: LoadedModel | Found):
        self.model = model
        self._known: dict[str, HeadLosses | None] = {}  # by rule; None: cannot be measured, or would take too long

    def are_known(self, budget: KVBudget, workload: Workload) -> bool:
        """Whether nothing is left to measure for a budget."""
        rule = budget.rule
        is_open = self._is_open(budget, workload)
        if is_open and rule not in self._known:
            self._read(rule)
        return not is_open or rule in self._known

    def shared(self, budget: KVBudget, workload: Workload) -> KVBudget:
        """The budget with the slots of each head for texts of the job; a budget that has them stays as it is. All heads
        get the same if the user says so, nothing was measured, or the budget is out of the measured range. Raises
        UserError for a file of losses that cannot be used."""
        if budget.by_head is not None or workload.gen_len == 1:  # nothing is evicted
            return budget
        slots = sum(budget.slots(workload.longest))
        length = budget.text_len(workload.longest, workload.gen_len)
        spec = self.model.spec
        if (by_hand := head_losses(budget.rule)) is not None:
            return replace(budget, by_head=by_hand.slots(slots, length, spec.windows))
        alike = replace(budget, by_head=())
        if not (self._is_open(budget, workload) and self.are_known(budget, workload)):
            return alike
        losses = self._known[budget.rule]
        if losses is None or not losses.measures(slots, length):
            return alike
        shared = replace(budget, by_head=losses.slots(slots, length, spec.windows))
        try:
            rule_for(shared, workload.longest, workload.gen_len, spec)
        except UserError:  # some head would have too few slots, or leave too few positions
            return alike
        return shared

    def _is_open(self, budget: KVBudget, workload: Workload) -> bool:
        """Whether the slots of each head are still to be decided, and could be."""
        model = self.model
        if budget.by_head is not None or option_layers(budget.rule) or model.tokenizer is None or model.is_dummy:
            return False
        slots = sum(budget.slots(workload.longest))
        fraction = slots / budget.text_len(workload.longest, workload.gen_len)
        is_measured = calibration.GRID[0] <= fraction <= calibration.GRID[-1]
        return slots >= LEAST_SLOTS and is_measured and model.spec.positions >= calibration.LEAST

    @cached_property
    def _fingerprint(self) -> str:
        return self.model.fingerprint

    def _file(self, rule: str) -> Path:
        return cache_folder("heads") / f"{self._fingerprint}-{crc32(rule.encode()):08x}.json"

    def _read(self, rule: str) -> None:
        """Take what was measured before for this model and rule, if anything."""
        try:
            path = self._file(rule)
        except UserError:  # other users may write there
            return
        if not path.exists():
            return
        try:
            data = read_json("what was measured", path)
            if (data["format"], data["rule"]) != (FORMAT, rule):
                raise ValueError
            losses = HeadLosses.from_dict(data) if data["losses"] else None  # it took too long
            heads = [self.model.spec.at(layer).kv_heads for layer in range(self.model.spec.layers)]
            if losses is not None and [*map(len, losses.losses)] != heads:
                raise ValueError
            self._known[rule] = losses
        except (UserError, KeyError, TypeError, ValueError):
            log.warning("%s is damaged, or of another version or model: it is not used", path)


class HeadSlots(KnownHeadSlots):
    """The same for a job, which measures what it does not know.

    Args:
        progress: show a bar while measuring.
    """

    def __init__(self, model: LoadedModel, progress: bool = True):
        super().__init__(model)
        self.progress = progress

    def measure(self, budget: KVBudget, workload: Workload, job_seconds: float = 0.0, room: float = inf) -> None:
        """Measure and keep what `shared` lacks, if the model can be measured.

        Args:
            job_seconds: what the job takes, if known.
            room: bytes of memory that measuring may take.
        """
        if not self.are_known(budget, workload):
            most_seconds = max(MOST_SECONDS, MOST_OF_JOB * job_seconds)
            self._known[budget.rule] = self._measured(budget.rule, most_seconds, room)

    def _measured(self, rule: str, most_seconds: float, room: float) -> HeadLosses | None:
        """Measure now, and keep it; None if that is not possible, or takes too much time or memory."""
        model = self.model
        window = min(WINDOW, model.spec.positions)
        if calibration.most_bytes(model, WINDOWS * window) > room:
            log.warning("all KV heads get the same slots: %.1f GiB are too little to measure them", room / GIB)
            return None
        try:
            calibration.check_heads(model.spec)
            ids = windows.cut(windows.read(None)[0], model.tokenizer, WINDOWS, window)
            with closing(LayerModel(model, self.progress, streams=True)) as layers:
                losses = calibration.measure(layers, ids, rule, self.progress, most_seconds)
        except UserError as e:
            log.info("all KV heads get the same slots: %s", e)
            return None
        if losses is None:
            log.warning(
                "to measure how many slots each KV head needs would take more than %.0f s: all get the same; "
                "`h2o-flexgen calibrate` measures it in any time",
                most_seconds,
            )
        self._keep(rule, losses)
        return losses

    def _keep(self, rule: str, losses: HeadLosses | None) -> None:
        found = HeadLosses((), ()) if losses is None else losses
        data = asdict(replace(found, model=self.model.name, rule=rule))
        try:
            keep(self._file(rule), json.dumps({"format": FORMAT, **data}))
        except UserError as e:
            log.warning("what was measured of the KV heads is not kept: %s", e)
