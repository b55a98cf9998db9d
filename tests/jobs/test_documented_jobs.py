"""The jobs of docs/jobs.md, from file to file, exactly as documented."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest
from command_tools import FP32, TINY, write_model
from machines import ROOT

pytest_plugins = ["command_tools"]

TEXT = (ROOT / "docs" / "jobs.md").read_text()
CODE = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TEXT, re.DOTALL))


@pytest.mark.parametrize(
    "job",
    [
        ("make_rows.py", "labels.jsonl", "count_labels.py", "})\n[]\n"),
        ("make_questions.py", "answers.jsonl", "grade.py", "of 2 are right\n"),
    ],
    ids=["labels", "answers"],
)
def test_a_documented_job(cli, texts, tmp_path, monkeypatch, capfd, job):
    """With a tiny model, whose answers are meaningless."""
    make, output, read, printed = job
    folder = tmp_path / "model"
    shutil.copytree(texts, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    write_model(folder, config=TINY | {"vocab_size": 300, "max_position_embeddings": 512})
    monkeypatch.chdir(tmp_path)
    command = re.search(rf"^h2o-flexgen generate (.*{output})$", TEXT, re.MULTILINE)[1]
    exec(CODE[make], {})
    code, _, err = cli("--model", folder, *FP32, *shlex.split(command))
    assert code == 0, err
    exec(CODE[read], {})
    assert capfd.readouterr().out.endswith(printed)
