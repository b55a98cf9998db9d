"""What KV budgets cost in quality, as `h2o-flexgen quality` has measured it. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from h2o_flexgen.errors import UserError
from h2o_flexgen.files import read_json
from h2o_flexgen.policy import KVBudget


@dataclass(frozen=True)
class Loss:
    """What a setting costs.

    Attributes:
        rule: the cache rule, with its options.
        hh_ratio, recent_ratio: slots as fractions of the longest prompt that was measured.
        rise: of the perplexity over the full cache's: 0.02 is 2 %.
        kv_bytes: of a sequence's cache in all layers.
    """

    rule: str
    hh_ratio: float
    recent_ratio: float
    rise: float
    kv_bytes: int

    @property
    def ratio(self) -> float:
        return self.hh_ratio + self.recent_ratio

    @property
    def kv_budget(self) -> KVBudget:
        return KVBudget.from_ratio(self.hh_ratio, self.recent_ratio, self.rule)

    def __str__(self) -> str:
        share = f"{self.hh_ratio:.3g} heavy + {self.recent_ratio:.3g} recent"
        return f"{self.rule} with {share} of the longest prompt ({self.rise:+.1%} perplexity)"


@dataclass(frozen=True)
class Losses:
    """The settings of a file by `h2o-flexgen quality --output`, and how much loss is accepted.

    Attributes:
        path: the file; model: the name of the model that was measured.
        full_ratio: tokens of prompt and output over those of the prompt: from so many slots on there is no loss.
        hh_share: the part of the slots that was for heavy hitters.
        max_loss: the largest rise of the perplexity that is accepted, as a fraction; None: any.
    """

    path: str
    model: str
    settings: tuple[Loss, ...]
    full_ratio: float
    hh_share: float
    max_loss: float | None = None

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
            settings = [Loss(*(row[name] for name in names)) for row in data["rows"] if row["slots"] is not None]
            # a KV budget cannot name more heavy or recent slots than the prompt has tokens
            settings = [loss for loss in settings if max(loss.hh_ratio, loss.recent_ratio) <= 1]
            for loss in settings:
                loss.kv_budget, f"{loss.rise + loss.kv_bytes:g}"  # raise for what is no budget, no number
            return cls(str(path), job["model"], tuple(settings), full_ratio, job["hh_share"], max_loss)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            made = "h2o-flexgen quality --output FILE makes one"
            raise UserError(f"`quality` {path} holds no perplexities of KV budgets: {made}") from None

    def cheapest(self) -> Loss:
        """The setting with the fewest bytes among those within `max_loss`. Raises UserError if there is none."""
        if not self.settings:
            raise UserError(f"`quality` {self.path} holds no setting but the full cache")
        good = [loss for loss in self.settings if self.allows(loss.rise)]
        if not good:
            best = min(self.settings, key=lambda loss: loss.rise)
            raise UserError(
                f"no setting of {self.path} costs at most {self.max_loss:.3g}, the best is {best}: raise `max_loss`, "
                "measure larger budgets, or keep the full cache"
            )
        return min(good, key=lambda loss: (loss.kv_bytes, loss.rise))

    def allows(self, rise: float | None) -> bool:
        """Whether a loss is accepted; one that is not known (None) is not, unless any is."""
        return self.max_loss is None or (rise is not None and rise <= self.max_loss)

    def at(self, rule: str, ratio: float) -> float | None:
        """The loss of a rule with slots for so much of the longest prompt, half of them heavy, on straight lines
        between what was measured and the full cache; None below the smallest budget that was measured.

        Raises:
            UserError: the rule was not measured with such halves.
        """
        known = sorted((loss.ratio, loss.rise) for loss in self.settings if loss.rule == rule)
        if not known or self.hh_share != 0.5:
            raise UserError(f"`quality` {self.path} has no budget of rule {rule} that is half heavy, half recent")
        if ratio < known[0][0]:
            return None
        known = [point for point in known if point[0] < self.full_ratio] + [(self.full_ratio, 0.0)]
        return float(np.interp(ratio, *zip(*known)))
