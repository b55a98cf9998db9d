"""A job from file to file, which goes on where an earlier run of it was stopped."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

from h2o_flexgen import __version__
from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.observer import Observer, Observers
from h2o_flexgen.engine.sampling import SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import Row
from h2o_flexgen.jobs.manifest import Manifest, lock, manifest_path
from h2o_flexgen.jobs.output import (
    OutputFile,
    done_row,
    error_of,
    failed_row,
    id_of,
    is_failed,
    no_row,
    put_in_order,
    read_done,
)
from h2o_flexgen.kernels.linear import dtype_name
from h2o_flexgen.llm import LLM
from h2o_flexgen.models.source import weight_files
from h2o_flexgen.policy import KVBudget

log = logging.getLogger(__name__)


class Job(Observer):
    """An output file and its manifest, locked against other jobs until `close`.

    Args:
        path: the output file. If it holds rows of this job they are kept, and only the others are run.
        restart: begin anew; the old file is kept, with a ~ behind its name.

    Attributes:
        before: the manifest of the run to go on with; None if the job begins.
        output: the file while rows are appended to it.

    Raises:
        UserError: another job has the file, or it is not one that a job wrote, or cannot be read.
    """

    def __init__(self, path: str, restart: bool = False):
        self.path = Path(os.path.realpath(path))  # of a link, what it points to is replaced
        self.manifest_path, self.restart = manifest_path(self.path), restart
        if self.path.exists() and not self.path.is_file():
            raise UserError(f"`output_file` {path} is not a file")
        if not os.access(self.path.parent, os.W_OK):
            raise UserError(f"`output_file` {path} cannot be written: nothing can be made in its folder")
        self.before: Manifest | None = None
        self.done: dict[str | int, dict] = {}
        self.output: OutputFile | None = None
        self._lock = lock(self.manifest_path)
        try:
            if not restart:
                self._read(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        for file in (self.output, self._lock):
            if file is not None:
                file.close()

    def _read(self, path: str) -> None:
        """What earlier runs have done. A file without a row is one that nobody began."""
        if self._lock is None and self.path.exists() and self.path.stat().st_size:
            raise UserError(
                f"`output_file` {path} is not one that a job wrote (it has no {self.manifest_path.name}): "
                "name another, or keep this one as another file with `restart`"
            )
        rows = read_done(self.path) if self._lock is not None else []
        if not rows:
            return
        self.before = Manifest.read(self.manifest_path)
        known = dict(self.before.rows)
        for number, row in enumerate(rows, 1):
            if id_of(row) not in known or id_of(row) in self.done:
                raise no_row(self.path, number)
            self.done[id_of(row)] = row

    @property
    def dtype(self) -> str | None:
        """The type that the job computes in since it began."""
        return self.before and self.before.settings.get("dtype")

    # running

    def run(self, llm: LLM, rows: list[Row], params: SamplingParams, retry_errors: bool = False) -> None:
        """Run the rows that are left, and put all in the order of the input.

        Args:
            params: of what a row does not set itself.
            retry_errors: failed rows are run again.

        Raises:
            UserError: other settings than those that the job began with, no row that can be run, or as
                `LLM.generate`. Rows that have finished are in the output file. A job runs once: to go on, make another.
        """
        if self.output is not None:
            raise UserError("this Job has run: make another one, which goes on")
        self.llm, self.rows = llm, rows
        order = [row.id for row in rows]
        self._check_settings(params)
        left = self._settle(retry_errors)
        if self.before and not left and len(self.done) == len(self.kept):
            put_in_order(self.path, self.kept, order)
            return
        observer, budget = llm.observer, llm.kv_budget
        try:
            self._admit(left, params)
            self._generate()
        except UserError as e:
            if self.output is None:
                raise
            self.output.flush()
            raise UserError(f"{e}; {self._progress()}") from None
        except KeyboardInterrupt as e:
            if self.output is not None:
                self.output.flush()
                e.add_note(f"{self._progress()}; the same command goes on{', without restart' if self.restart else ''}")
            raise
        finally:  # the model may run another job
            llm.observer, llm.kv_budget = observer, budget
        self.output.finish(order)

    def _progress(self) -> str:
        return f"{self.output.written} of {len(self.rows)} rows are done"

    def _settings(self, params: SamplingParams, longest: int) -> dict:
        """All that decides the tokens of a row, besides itself and the slots of its KV cache."""
        model, budget = self.llm.model, self.llm.kv_budget
        sampling = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "ignore_eos", "seed")}
        sampling |= {"gen_len": params.max_tokens, "stop": list(params.stop)}
        slots = slots_of(budget, longest) if isinstance(budget, KVBudget) else budget
        return {
            "model": model.name,
            "files": fingerprint(model),
            "dtype": dtype_name(self.llm.dtype),
            "kv_budget": slots,
            **sampling,
            "version": __version__,
        }

    def _check_settings(self, params: SamplingParams) -> None:
        """Raises UserError if the job began with others."""
        if self.before is None:
            return
        old, new = self.before.settings, self._settings(params, self.before.longest_prompt)
        if old.get("files") == new["files"]:
            new["model"] = old.get("model")  # where it lies does not matter
        changed = [
            "the model's files or tokenizer" if name == "files" else f"`{name}` {old.get(name)!r}, now {new[name]!r}"
            for name in new
            if old.get(name) != new[name]
        ]
        if changed:
            raise UserError(
                f"the job in {self.path} began with other settings: {'; '.join(changed)}: give the old "
                "ones, or begin anew with `restart`, which keeps the old file"
            )

    def _settle(self, retry_errors: bool) -> list[Row]:
        """The rows that are left, and in `kept` those that are not; says how many of each there are."""
        old = dict(self.before.rows) if self.before else {}
        by_id = {row.id: row for row in self.rows}
        kept = {id: row for id, row in self.done.items() if id in by_id and old[id] == by_id[id].digest}
        if self.done and not kept:
            raise UserError(
                f"no row in {self.path} is of these rows: name its own input file, or begin anew with "
                "`restart`, which keeps the old file"
            )
        self.dropped = len(self.done) - len(kept)
        changed = sum(id in old and old[id] != row.digest for id, row in by_id.items())
        again = [id for id, row in kept.items() if is_failed(row)] if retry_errors else []
        for id in again:
            del kept[id]
        self.kept = [self._numbered(by_id[id], row) for id, row in kept.items()]
        left = [row for row in self.rows if row.id not in kept]
        if self.before:
            added, gone = len(by_id.keys() - old.keys()), len(old.keys() - by_id.keys())
            self._say(len(left), changed=changed, added=added, gone=gone, again=len(again))
        return left

    def _numbered(self, row: Row, done: dict) -> dict:
        """A finished row, whose place in the input may be another now."""
        return done | {"index": row.index} if "index" in done else done

    def _say(self, left: int, **counts: int) -> None:
        """How many rows are done, failed and left, and what else is to be said of some."""
        ways = {
            "changed": "were changed and run again",
            "added": "are new",
            "again": "failed and run again",
            "gone": "are no longer in the input",
        }
        failed = sum(map(is_failed, self.kept))
        done = f"{len(self.kept) - failed} of {len(self.rows)} rows are done, {failed} failed, {left} are left"
        more = ", ".join(f"{counts[name]} {what}" for name, what in ways.items() if counts[name])
        log.warning("%s: %s%s", "goes on" if left else "nothing to do", done, more and f"; {more}")

    def _admit(self, left: list[Row], params: SamplingParams) -> None:
        """Encode the rows that are left: all prompts are known before the first is run."""
        self.todo, self.refused = [], []
        for row in left:
            prompt, own = request(row, params, self.llm.tokenizer)
            try:
                self.todo.append((row, self.llm.admit(prompt, own.max_tokens), own))
            except UserError as e:
                self.refused.append((row, e))
        if not self.todo and not self.kept:
            row, error = self.refused[0]
            raise UserError(f"none of the {len(self.rows)} rows of `input_file` can be run; row {row.index}: {error}")
        longest = max((len(ids) for _, ids, _ in self.todo), default=1)
        self.now = self.before or Manifest(self._settings(params, longest), None, longest, [], [])
        self._fix_budget(longest)

    def _fix_budget(self, longest: int) -> None:
        """Let the model run with the slots that the job began with, whatever prompts are left now."""
        budget = self.llm.kv_budget
        if self.before is None:
            if not isinstance(budget, KVBudget):
                return
            self.now.kv_budget = slots_of(budget, longest)
        slots = self.now.kv_budget
        self.llm.kv_budget = slots and KVBudget.from_size(slots["heavy"], slots["recent"], slots["rule"])
        if slots and longest > self.now.longest_prompt:
            known, kept = self.now.longest_prompt, f"{slots['heavy']} heavy + {slots['recent']} recent slots"
            log.warning(
                "a new prompt has %d tokens, the longest so far had %d: its KV budget is %s too", longest, known, kept
            )

    def _generate(self) -> None:
        if not self.todo:
            self.on_begin()
            return
        self.llm.observer = Observers(self.llm.observer, self)
        _, prompts, params = zip(*self.todo)
        keys = [row.key for row, _, _ in self.todo]
        self.llm.generate(prompts, params, keys=keys, skip_errors=True, on_output=self._take)

    def on_plan(self, choice) -> None:
        """A KV budget "auto" has become one of slots."""
        if self.before is None and self.llm.kv_budget == "auto" and choice.kv_budget is not None:
            self.now.kv_budget = slots_of(choice.kv_budget, self.now.longest_prompt)

    def on_begin(self) -> None:
        """All that may refuse the job has been passed: now files are touched."""
        self.now.rows = [[row.id, row.digest] for row in self.rows]
        self.now.runs.append({"start": time.time(), "done": len(self.kept)})
        is_new = self._lock is None
        try:
            if (self.restart or self.dropped) and self.path.exists() and self.path.stat().st_size:
                self._keep_old()  # first: another run must not take its rows for this job's
            if is_new:
                self._lock = self.now.write(self.manifest_path, is_new=True)
            self.output = OutputFile(self.path, self.kept)
            if not is_new:  # behind the rows: a changed one must not be there under its new digest
                old, self._lock = self._lock, self.now.write(self.manifest_path, is_new=False)
                old.close()
        except (BlockingIOError, FileExistsError):
            raise UserError(f"`output_file` {self.path}: another job is writing it") from None
        except OSError as e:
            raise UserError(f"`output_file` {self.path} cannot be written: {e.strerror}") from None
        for row, error in self.refused:
            self.output.add(failed_row(row, error))
        self.output.flush()

    def _keep_old(self) -> None:
        """Finished rows that this run does not take over are not thrown away."""
        kept = Path(f"{self.path}~")
        while kept.exists():
            kept = Path(f"{kept}~")
        if self.restart:
            os.rename(self.path, kept)
        else:
            shutil.copyfile(self.path, kept)
        log.warning("the old output file is kept in %s", kept)

    def _take(self, output) -> None:
        """A finished row."""
        row = self.todo[output.index][0]
        self.output.add(done_row(row, output, self.llm.model.name, self.llm.tokenizer))

    def on_finished(self, sequences: list) -> None:
        self.output.flush()

    on_block_end = on_finished

    def errors(self) -> list[str]:
        """Of all rows that failed, in this run or before."""
        rows = self.output.rows if self.output else self.kept
        return [f"row {id_of(row)}: {error_of(row)}" for row in rows if is_failed(row)]


def request(row: Row, params: SamplingParams, tokenizer) -> tuple:
    """The prompt of a row, or the UserError that stands for one, and its sampling: `params` and what it sets itself."""
    try:
        own = replace(params, **row.params)
        if own.stop and tokenizer is None:
            raise UserError("`stop` needs a tokenizer, and this model has none: leave it out")
        return row.prompt, own
    except UserError as e:
        return e, params


def slots_of(budget: KVBudget, longest_prompt: int) -> dict:
    heavy, recent = budget.slots(longest_prompt)
    return {"heavy": heavy, "recent": recent, "rule": budget.rule}


def fingerprint(model: LoadedModel) -> str:
    """Of a model: its configuration, samples of its weights, its tokenizer and chat template. Where they lie, and since
    when, does not count: a copy is the same model.

    Raises:
        UserError: the weights cannot be read.
    """
    found = hashlib.sha256(repr((model.spec, model.is_dummy)).encode())
    if not model.is_dummy:
        path = model.source.path
        for file in weight_files(path) if path.is_dir() else [path]:
            found.update(_samples(file))
    if model.tokenizer is not None:
        backend = getattr(model.tokenizer, "backend_tokenizer", None)
        parts = json.loads(backend.to_str()) if backend else dict(sorted(model.tokenizer.get_vocab().items()))
        for name in ("truncation", "padding"):  # encoding changes them
            parts.pop(name, None)
        found.update(repr((parts, model.tokenizer.chat_template)).encode())
    return found.hexdigest()[:16]


def _samples(path: Path) -> bytes:
    """Of a file: its size, and 16 pieces of 4 KiB at even distances."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            pieces = [str(size).encode()]
            for n in range(16):
                file.seek(n * max(0, size - 4096) // 15)
                pieces.append(file.read(4096))
        return b"".join(pieces)
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from None
