"""The output file of a job, split as OpenAI does: responses in one file, errors in another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from h2o_flexgen.jobs.output import DoneRow, encoded, open_done, read_done


@dataclass
class Tally:
    """Counts the rows of a job's output file, while its lines are copied.

    Attributes:
        completed, failed: rows.
        input_tokens, output_tokens: of those that were run.
    """

    path: Path
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def responses(self) -> Iterator[bytes]:
        """The lines of the rows that were run. Raises UserError if the file is damaged or cannot be read."""
        for row in self._rows():
            if row.error is None:
                self.completed += 1
                self.input_tokens += row.data["response"]["body"]["usage"]["prompt_tokens"]
                self.output_tokens += row.tokens
                yield encoded(row.data)

    def errors(self) -> Iterator[bytes]:
        """The lines of the others. Raises UserError if the file is damaged or cannot be read."""
        for row in self._rows():
            if row.error is not None:
                self.failed += 1
                yield encoded(row.data)

    def _rows(self) -> Iterator[DoneRow]:
        """None if there is no file, because no row has ended."""
        with open_done(self.path) as file:
            yield from map(itemgetter(1), read_done(self.path, file))

    def usage(self) -> dict:
        """OpenAI's batch usage."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }
