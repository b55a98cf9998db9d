"""Progress on stderr: a bar in a terminal, an occasional plain line in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

#: seconds between lines of a log, and the fewest after which another tenth of the work is worth a line
LINE_SECONDS = 60.0
TENTH_SECONDS = 5.0


def bar(
    iterable: Iterable | None = None,
    desc: str = "",
    *,
    total: int | None = None,
    unit: str = "steps",
    show: bool = True,
    leave: bool = False,
) -> tqdm | Lines:
    """Progress of a loop over `iterable`, or of `update` up to `total`.

    Args:
        desc: what is being done.
        unit: of the count; "B" is shown with prefixes, like 1.2G.
        show: False for no output.
        leave: keep the bar on the screen at the end, or always write the last line in a log file.
    """
    if show and not sys.stderr.isatty():
        return Lines(iterable, desc, total, unit, leave)
    is_bytes = unit == "B"
    options = dict(total=total, unit=unit if is_bytes else f" {unit}", unit_scale=is_bytes, leave=leave)
    return tqdm(iterable, desc, disable=not show, smoothing=0.1, **options)


class Lines:
    """The used part of tqdm's interface for a log file, where no line is overwritten."""

    def __init__(self, iterable: Iterable | None, desc: str, total: int | None, unit: str, leave: bool):
        self.iterable = iterable
        self.desc = desc
        self.unit = unit
        self.leave = leave
        self.total = len(iterable) if total is None and iterable is not None else total
        self.n = 0
        self.postfix = ""
        self.start = time.monotonic()
        self.last = 0  # count and time of the last line
        self.last_time = self.start

    def __iter__(self) -> Iterator:
        with self:
            for item in self.iterable:
                yield item
                self.update(1)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def set_postfix_str(self, text: str, refresh: bool = False) -> None:
        self.postfix = text

    def update(self, n: int) -> None:
        self.n += n
        self.refresh()

    def refresh(self) -> None:
        """Write a line if one is due."""
        waited = time.monotonic() - self.last_time
        if waited >= LINE_SECONDS or (waited >= TENTH_SECONDS and 10 * (self.n - self.last) >= (self.total or self.n)):
            self._write()

    def close(self) -> None:
        if (self.leave or self.last) and self.n > self.last:
            self._write()

    def _write(self) -> None:
        self.last = self.n
        self.last_time = time.monotonic()
        print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        def amount(n: float) -> str:
            return tqdm.format_sizeof(n) if self.unit == "B" else f"{n:.4g}" if isinstance(n, float) else str(n)

        of = "" if self.total is None else f" of {amount(self.total)}"
        parts = [f"{amount(self.n)}{of} {self.unit}", self.postfix]
        if self.n and self.iterable is None:
            seconds = max(1e-9, time.monotonic() - self.start)
            parts.append(f"{amount(self.n / seconds)} {self.unit}/s")
            if self.total is not None and self.total > self.n:
                parts.append(f"{tqdm.format_interval((self.total - self.n) * seconds / self.n)} left")
        return f"{self.desc}: {', '.join(filter(None, parts))}"
