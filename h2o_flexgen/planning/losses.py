"""What KV budgets cost in quality, as `h2o-flexgen quality` has measured it. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.policy import KVBudget
from h2o_flexgen.utils.files import read_json


def weights_text(compress_weight: str | None, compute: str) -> str:
    """The format of weights, and the matmuls, for people."""
    return f"weights {'in ' + compress_weight if compress_weight else 'as stored'} and {compute} matmuls"


@dataclass(frozen=True)
class Loss:
    """What a setting costs.

    Attributes:
        rule: the cache rule, with its options.
        hh_ratio, recent_ratio: slots as fractions of the longest prompt that was measured.
        rise: of the perplexity over the full cache's: 0.02 is 2 %.
        kv_bytes: of a sequence's cache in all layers.
        compress_cache: the format of the cache: int8, int4, or None for floats.
    """

    rule: str
    hh_ratio: float | None
    recent_ratio: float | None
    rise: float
    kv_bytes: int
    compress_cache: str | None = None

    @property
    def is_full(self) -> bool:
        return self.hh_ratio is None

    @property
    def ratio(self) -> float:
        """Slots; not of a full cache."""
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
    """The settings of a file by `h2o-flexgen quality --output`, and how much loss is accepted.

    Attributes:
        path: the file; model: the name of the model that was measured.
        full_ratio: tokens of prompt and output over those of the prompt: from so many slots on there is no loss.
        hh_share: the part of the slots that was for heavy hitters.
        max_loss: the largest rise of the perplexity that is accepted, as a fraction; None: any.
        weights: format of the weights, and matmuls, with which they were measured, as in `weights_text`.
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
        """Raises UserError: `max_loss` is not in [0, 1), or the file cannot be read or is of another kind."""
        if max_loss is not None and not 0 <= max_loss < 1:
            percent = f": for {max_loss:g} % give {max_loss / 100:g}" if 1 <= max_loss <= 100 else ""
            raise UserError(f"`max_loss` must lie in [0, 1), not {max_loss:g}{percent}")
        data = read_json("`quality`", path)
        try:
            job = data["workload"]
            full_ratio = (job["prompt_len"] + job["gen_len"]) / job["prompt_len"]
            names = ("rule", "hh_ratio", "recent_ratio", "rise", "kv_bytes")
            rows = [row for row in data["rows"] if row["slots"] is not None or row.get("compress_cache")]
            settings = [Loss(*(row[name] for name in names), row.get("compress_cache")) for row in rows]
            # a KV budget cannot name more heavy or recent slots than the prompt has tokens
            settings = [loss for loss in settings if loss.is_full or max(loss.hh_ratio, loss.recent_ratio) <= 1]
            for loss in settings:
                loss.kv_budget, f"{loss.rise + loss.kv_bytes:g}"  # raise for what is no budget, no number
            weights = weights_text(job.get("compress_weight"), job.get("compute", "exact"))
            return cls(str(path), job["model"], tuple(settings), full_ratio, job["hh_share"], max_loss, weights)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            made = "h2o-flexgen quality --output FILE makes one"
            raise UserError(f"`quality` {path} holds no perplexities of KV budgets: {made}") from None

    @property
    def formats(self) -> set[str | None]:
        """Of the cache, in which something was measured; the full cache as floats always is."""
        return {None} | {loss.compress_cache for loss in self.settings}

    def cheapest(self, compress_cache: str | None = None) -> Loss:
        """The setting with the fewest bytes among those within `max_loss`, with the cache in this format, or in any for
        "auto". Raises UserError if there is none."""
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
        """Whether a loss is accepted; one that is not known (None) is not, unless any is."""
        return self.max_loss is None or (rise is not None and rise <= self.max_loss)

    def at(self, rule: str | None, ratio: float | None, compress_cache: str | None = None) -> float | None:
        """The loss of a rule with slots for this part of the longest prompt, half of them heavy, and of the full cache
        for None; with the cache in this format. It is on straight lines between what was measured and the full cache;
        None below the smallest budget that was measured, and for a full cache that was not.

        Raises:
            UserError: the rule was not measured with such halves.
        """
        same = [loss for loss in self.settings if loss.compress_cache == compress_cache]
        full = [loss.rise for loss in same if loss.is_full] if compress_cache else [0.0]
        if ratio is None:
            return full[0] if full else None
        known = sorted((loss.ratio, loss.rise) for loss in same if loss.rule == rule and not loss.is_full)
        if not known or self.hh_share != 0.5:
            in_format = f" in {compress_cache}" if compress_cache else ""
            half = "that is half heavy, half recent"
            raise UserError(f"`quality` {self.path} has no budget of rule {rule}{in_format} {half}")
        if ratio < known[0][0]:
            return None
        known = [point for point in known if point[0] < self.full_ratio] + [(self.full_ratio, rise) for rise in full]
        return float(np.interp(ratio, *zip(*known)))
