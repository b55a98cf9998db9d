"""README and docs say what the results say, and point to what is there."""

import os
import re
import shutil
import subprocess

import pytest

from bench import tables
from bench.common import RESULTS, ROOT
from bench.tables import DOCUMENTS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_made_from_the_results(path):
    text = path.read_text()
    assert tables.fill(text) == text, "run python -m bench.tables"


def test_every_result_stands_in_a_table():
    shown = {name for path in DOCUMENTS for name in re.findall(r"<!-- table (\S+) -->", path.read_text())}
    files = {path.stem for path in RESULTS.glob("*.json") if not path.stem.startswith(("quick_", "gpu_check"))}
    assert {"throughput" if name.startswith("throughput") else name for name in files} <= shown


def test_an_old_python_is_refused_before_anything_is_set_up(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    argv = ["bash", tmp_path / "scripts" / "demo.sh"]
    done = subprocess.run(argv, env={**os.environ, "PYTHON": "false"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: false is not Python 3.11 or later")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize(
    "path", [*(ROOT / "scripts").glob("*.py"), *(ROOT / "bench").rglob("*.py")], ids=lambda p: p.name
)
def test_measuring_code_reads_no_private_name_of_the_package(path):
    if path.name == "train_demo_model.py":
        return
    private = re.findall(r"(?:llm|engine|weights|Engine|LLM|hardware|opt)\._[a-z]\w*", path.read_text())
    imported = re.findall(r"from h2o_flexgen[\w.]* import .*\b_[a-z]\w*", path.read_text())
    assert private == imported == []
