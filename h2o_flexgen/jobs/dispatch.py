"""Which rows go to which worker, and what becomes of them when a worker dies. Pure Python, no Ray.

Rows go to whoever asks, so that a slow worker does less. Those of a worker that has died are run again. Rows whose
workers have died several times are suspects: they are run by themselves, by halves, until one is left that takes its
worker with it each time. A worker that dies meanwhile on other rows shows that it may not be the row.

    A B C D E F G H   die 3 times      A B C D   end
                                       E F G H   die      E F   die      E   ends
                                                                         F   dies 3 times: an error
                                                          G H   end
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

from h2o_flexgen.engine.batch import Sequence

#: so often workers may die on the same rows, and then on one of them alone
MOST_DEATHS = 3
#: the same on one alone, if workers have also died on others: machines are lost, or somebody kills them
MOST_ALONE = 8
FATAL = "its worker died each time that it ran this row alone"

#: rows by number, in the order in which the job has read them
Numbered = dict[int, Sequence]


@dataclass
class Suspects:
    """Rows that are run by themselves; `deaths`: of workers, one after the other, while there was only one row."""

    rows: Numbered
    deaths: int = 0


class Dispatch:
    """The rows of a job that have not ended.

    Args:
        rows: read as workers ask for them.
        count: how many there are; if there are more, nobody knows what a share of them is.
        workers: how many share them.

    Attributes:
        left: rows that have not ended.
        held: the rows of each worker.
    """

    def __init__(self, rows: Iterable[Sequence], count: int, workers: int):
        self.count = count
        self.left = count
        self.held: list[Numbered] = [{} for _ in range(workers)]
        self._rows = enumerate(rows)
        self._next_row = list(islice(self._rows, 1))  # the row after those that were taken
        self._again: Numbered = {}  # of workers that have died
        self._all_deaths = 0  # of workers
        self._deaths: dict[int, int] = {}  # of workers that held a row, if there were any
        self._suspects: deque[Suspects] = deque()
        self._alone: dict[int, Suspects] = {}  # by worker

    @property
    def has_more(self) -> bool:
        """Whether some rows are with no worker."""
        return bool(self._next_row or self._again or self._suspects)

    @property
    def is_done(self) -> bool:
        return not self.has_more and not any(self.held)

    def take(self, worker: int, count: int) -> Numbered:
        """Up to `count` more rows for a worker. None if it shall end with those that it holds: there are no more, it
        runs suspects, or it holds its share of what is left."""
        held = self.held[worker]
        if not held:
            self._alone.pop(worker, None)
        if worker in self._alone:
            return {}
        if not held and self._suspects:
            self._alone[worker] = self._suspects.popleft()
            found = self._alone[worker].rows
        else:
            share = max(1, -(-self.left // len(self.held)))
            is_known = not self._next_row or self._next_row[0][0] < self.count
            found = self._next(min(count, share - len(held)) if is_known else count)
        held.update(found)
        return found

    def _next(self, count: int) -> Numbered:
        numbers = list(islice(self._again, max(0, count)))
        found = {number: self._again.pop(number) for number in numbers}
        if self._next_row and len(found) < count:
            found.update(chain(self._next_row, islice(self._rows, count - len(found) - 1)))
            self._next_row = list(islice(self._rows, 1))
        return found

    def ended(self, worker: int, number: int) -> Sequence:
        """Note that a row has ended; returns it."""
        self._deaths.pop(number, None)
        self.left -= 1
        return self.held[worker].pop(number)

    def give_back(self, worker: int) -> None:
        """The rows of a worker that has not begun with them are run again, and nothing is held against them."""
        self._all_deaths += 1
        self._forgive()
        held = self.held[worker]
        self.held[worker] = {}
        group = self._alone.pop(worker, None)
        if group is None:
            self._again.update(held)
        elif held:
            self._suspects.appendleft(Suspects(held, group.deaths))

    def died(self, worker: int) -> list[Sequence]:
        """A worker has died with its rows, which are run again. Returns those that are not, and have failed."""
        held = self.held[worker]
        self.held[worker] = {}
        self._all_deaths += 1
        for number in held:
            self._deaths[number] = self._deaths.get(number, 0) + 1
        if worker in self._alone:
            return self._died_alone(self._alone.pop(worker), held)
        self._forgive()
        suspects = {}
        for number, s in held.items():
            (suspects if self._deaths[number] >= MOST_DEATHS else self._again)[number] = s
        self._suspect(suspects)
        return []

    def _died_alone(self, group: Suspects, held: Numbered) -> list[Sequence]:
        """`held`: those of the group that have not ended."""
        if len(group.rows) > 1 or not held:
            numbers = list(held)
            half = len(numbers) // 2
            for part in (numbers[:half], numbers[half:]):
                self._suspect({number: held[number] for number in part})
            return []
        ((number, s),) = held.items()
        group.deaths += 1
        is_calm = self._deaths[number] == self._all_deaths
        if group.deaths < (MOST_DEATHS if is_calm else MOST_ALONE):
            self._suspects.append(group)
            return []
        s.fail(FATAL)
        self.left -= 1
        return [s]

    def _forgive(self) -> None:
        """A worker has died that ran no suspects: those that did may have died of the same."""
        for group in (*self._suspects, *self._alone.values()):
            group.deaths = 0

    def _suspect(self, rows: Numbered) -> None:
        if rows:
            self._suspects.append(Suspects(rows))
