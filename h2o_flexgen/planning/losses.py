"""What KV budgets cost in quality, as measured by `h2o-flexgen quality`. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.utils.files import read_json


def weights_text(compress_weight: str | None, compute: str) -> str:
    """The format of the weights and the matmuls they go through, human-readable."""
    return f"weights {'in ' + compress_weight if compress_weight else 'as stored'} and {compute} matmuls"


@dataclass(frozen=True)
class Loss:
    """The measured cost of one KV budget and cache format.

    Attributes:
        rule: the cache rule, with its options.
        hh_ratio, recent_ratio: slots as fractions of the longest measured prompt; None for the full cache.
        rise: increase in perplexity relative to the full cache: 0.02 is 2 %.
        kv_bytes: size of a sequence's cache, all layers together.
        compress_cache: format of the cache: int8, int4, or None for floats.
    """

    rule: str
    hh_ratio: float | None
    recent_ratio: float | None
    rise: float
    kv_bytes: int
    compress_cache: str | None = None

    @classmethod
    def from_row(cls, row: dict) -> Loss:
        """From a row of a quality file. Raises KeyError if a value is missing."""
        compress_cache = row.get("compress_cache")
        return cls(row["rule"], row["hh_ratio"], row["recent_ratio"], row["rise"], row["kv_bytes"], compress_cache)

    @property
    def is_full(self) -> bool:
        return self.hh_ratio is None

    @property
    def ratio(self) -> float:
        """Slots as a fraction of the longest prompt; undefined for the full cache."""
        return self.hh_ratio + self.recent_ratio

    @property
    def kv_budget(self) -> KVBudget | None:
        return None if self.is_full else KVBudget.from_ratio(self.hh_ratio, self.recent_ratio, self.rule)

    def __str__(self) -> str:
        slots = "the full cache"
        if not self.is_full:
            share = f"{self.hh_ratio:.3g} heavy + {self.recent_ratio:.3g} recent"
            slots = f"{self.rule} with {share} of the longest prompt"
        return slots + (f" in {self.compress_cache}" if self.compress_cache else "") + f" ({self.rise:+.1%} perplexity)"


@dataclass(frozen=True)
class Losses:
    """The measurements in a file by `h2o-flexgen quality --output`, and the loss the user accepts.

    Attributes:
        path: the file; model: name of the measured model.
        full_ratio: tokens of prompt and output over those of the prompt: a budget of this ratio evicts nothing.
        hh_share: fraction of the slots that went to heavy hitters.
        max_loss: largest accepted rise of the perplexity, as a fraction; None accepts any.
        weights: weight format and matmuls of the measurement, as `weights_text` gives them.
    """

    path: str
    model: str
    settings: tuple[Loss, ...]
    full_ratio: float
    hh_share: float
    max_loss: float | None = None
    weights: str = ""

    @classmethod
    def from_file(cls, path: str | Path, max_loss: float | None = None) -> Losses:
        """Raises UserError if `max_loss` is outside [0, 1), or the file cannot be read or holds something else."""
        if max_loss is not None and not 0 <= max_loss < 1:
            percent = f": for {max_loss:g} % give {max_loss / 100:g}" if 1 <= max_loss <= 100 else ""
            raise UserError(f"`max_loss` must lie in [0, 1), not {max_loss:g}{percent}")
        data = read_json("`quality`", path)
        try:
            job = data["workload"]
            full_ratio = (job["prompt_len"] + job["gen_len"]) / job["prompt_len"]
            rows = [row for row in data["rows"] if row["slots"] is not None or row.get("compress_cache")]
            settings = map(Loss.from_row, rows)
            # a KV budget cannot ask for more heavy or recent slots than the prompt has tokens
            settings = [loss for loss in settings if loss.is_full or max(loss.hh_ratio, loss.recent_ratio) <= 1]
            for loss in settings:
                loss.kv_budget, f"{loss.rise + loss.kv_bytes:g}"  # raise for an invalid budget or a non-number
            weights = weights_text(job.get("compress_weight"), job.get("compute", "exact"))
            return cls(str(path), job["model"], tuple(settings), full_ratio, job["hh_share"], max_loss, weights)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            made = "h2o-flexgen quality --output FILE makes one"
            raise UserError(f"`quality` {path} holds no perplexities of KV budgets: {made}") from None

    @property
    def formats(self) -> set[str | None]:
        """The measured cache formats; None (floats) is always among them, since the full cache is the baseline."""
        return {None} | {loss.compress_cache for loss in self.settings}

    def cheapest(self, compress_cache: str | None = None) -> Loss:
        """The setting with the fewest bytes within `max_loss`, in this cache format, or in any for "auto". Raises
        UserError if there is none."""
        settings = [loss for loss in self.settings if compress_cache in ("auto", loss.compress_cache)]
        if not settings:
            others = f" with `compress_cache` {compress_cache}" if compress_cache else ""
            raise UserError(f"`quality` {self.path} holds no setting but the full cache{others}")
        good = [loss for loss in settings if self.allows(loss.rise)]
        if not good:
            best = min(settings, key=lambda loss: loss.rise)
            raise UserError(
                f"no setting of {self.path} costs at most {self.max_loss:.3g}, the best is {best}: raise `max_loss`, "
                "measure larger budgets, or keep the full cache"
            )
        return min(good, key=lambda loss: (loss.kv_bytes, loss.rise))

    def allows(self, rise: float | None) -> bool:
        """Whether a rise of the perplexity is accepted; an unknown one (None) only without `max_loss`."""
        return self.max_loss is None or (rise is not None and rise <= self.max_loss)

    def at(self, rule: str | None, ratio: float | None, compress_cache: str | None = None) -> float | None:
        """The rise of the perplexity with slots for `ratio` of the longest prompt, half of them heavy, or with the full
        cache (None). It is interpolated linearly between the measured budgets and the full cache.

        Returns None if it is unknown: below the smallest measured budget, or for a full cache in a format that was not
        measured. Raises UserError if the rule was not measured with half heavy, half recent slots.
        """
        in_format = [loss for loss in self.settings if loss.compress_cache == compress_cache]
        full = [loss.rise for loss in in_format if loss.is_full] if compress_cache else [0.0]
        if ratio is None:
            return full[0] if full else None
        budgets = sorted((loss.ratio, loss.rise) for loss in in_format if loss.rule == rule and not loss.is_full)
        if not budgets or self.hh_share != 0.5:
            name = f"rule {rule}" + (f" in {compress_cache}" if compress_cache else "")
            missing = f"has no budget of {name} that is half heavy, half recent"
            raise UserError(f"`quality` {self.path} {missing}: measure it with h2o-flexgen quality")
        smallest, _ = budgets[0]
        if ratio < smallest:
            return None
        known = [point for point in budgets if point[0] < self.full_ratio] + [(self.full_ratio, rise) for rise in full]
        ratios, rises = zip(*known)
        return float(np.interp(ratio, ratios, rises))
