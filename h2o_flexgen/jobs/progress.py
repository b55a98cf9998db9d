"""How far a job is, and how fast its run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a job is.

    Attributes:
        total: its rows.
        done: rows that have ended, in this run or before; `failed` of them in an error.
        new: rows that this run has generated, with `tokens` in all.
        seconds: from the beginning of the run to the last of them.
    """

    total: int
    done: int
    failed: int
    new: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def completed(self) -> int:
        return max(0, self.done - self.failed)

    @property
    def left(self) -> int:
        return max(0, self.total - self.done)

    @property
    def rows_per_s(self) -> float | None:
        """None if nothing is known yet; so are the others."""
        return self.new / self.seconds if self.new and self.seconds > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.new and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """At the rate of this run's rows."""
        return None if self.rows_per_s is None else self.left / self.rows_per_s

    def to_dict(self) -> dict:
        rates = {name: getattr(self, name) for name in ("rows_per_s", "tokens_per_s", "seconds_left")}
        return {"rows_done": self.done} | {name: rate and round(rate, 3) for name, rate in rates.items()}
