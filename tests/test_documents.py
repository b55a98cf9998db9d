"""README and docs link to existing places, and name commands and code that run."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.common import ROOT

pytest_plugins = ["command_tools"]

#: modules that `python -m` still runs under their historical names
HISTORICAL = {"flex_opt": "generate", "policy_search": "search"}
ALL = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def each(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


def written_by_hand(path: Path) -> str:
    """A document without its tables of results, whose commands are those of their day."""
    return re.sub(r"<!-- table .*?<!-- end -->", "", path.read_text(), flags=re.S)


def commands(path: Path, begins: str) -> list[list[str]]:
    """The words of all commands that begin with a pattern, in code blocks and between backticks."""
    text = written_by_hand(path).replace("\\\n", " ")
    lines = re.findall(rf"^(?:\$ )?((?:{begins}).*)$", text, re.M)
    inline = re.findall(rf"`((?:{begins})[^`\n]*)`", text)
    return [shlex.split(line, comments=True) for line in lines + inline]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.M | re.S)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_readme_is_read_in_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@each(ALL)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor:
            assert anchor in map(slug, re.findall(r"^#+ (.*)$", target.read_text(), re.M)), link


@each(ALL)
def test_commands_name_options_that_exist(path):
    for words in commands(path, r"(?:\.venv/bin/)?python -m h2o_flexgen\.\w|h2o-flexgen [a-z]"):
        if words[0] == "h2o-flexgen":
            name, argv = words[1], words[2:]
        else:
            name, argv = words[2].rpartition(".")[2], words[3:]
            name = HISTORICAL.get(name, name)
        parser = importlib.import_module(f"h2o_flexgen.commands.{name}").make_parser(name)
        if argv not in ([], ["--help"]):  # named alone, between backticks
            parser.parse_args(argv)


@each(ALL)
def test_commands_name_scripts_that_exist(path):
    for words in commands(path, r"bash scripts/|(?:\.venv/bin/)?python (?:scripts/|-m bench\.)"):
        script = words[1] if words[1] != "-m" else f"{words[2].replace('.', '/')}.py"
        assert (ROOT / script).is_file(), words
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert {words[1] for words in commands(path, "make [a-z-]+ *(?=$|#|`)")} <= set(targets)


def test_the_transcript_is_of_the_demo():
    text = (ROOT / "docs" / "quality-evidence.md").read_text()
    shown = re.search(r"<!-- transcript demo -->\n```\w*\n(.*?)```\n<!-- end -->", text, re.S)
    assert re.findall(r"^\$ (.*)$", shown[1], re.M) == ["bash scripts/demo.sh"]


@each(ALL)
def test_code_can_be_compiled(path):
    for block in python_blocks(path):
        compile(block, path.name, "exec")


@each([path for path in ALL if any('LLM("' in block for block in python_blocks(path))])
def test_code_that_uses_a_model_runs(path, talker, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("H2O_FLEXGEN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for block in [block for block in python_blocks(path) if 'LLM("' in block]:
        code = re.sub(r'LLM\("[^"]+"', f'LLM("{talker}", dtype="float32"', block)
        exec(compile(code, path.name, "exec"), {})
        assert capsys.readouterr().out


def test_an_old_python_is_refused_before_anything_is_set_up(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    argv = ["bash", tmp_path / "scripts" / "demo.sh"]
    done = subprocess.run(argv, env={**os.environ, "PYTHON": "false"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: false is not Python 3.11 or later")
    assert not (tmp_path / ".venv").exists()


def test_measuring_code_reads_no_private_name_of_the_package():
    for path in [*(ROOT / "scripts").glob("*.py"), *(ROOT / "bench").rglob("*.py")]:
        private = re.findall(r"(?:llm|engine|weights|Engine|LLM|hardware|opt)\._[a-z]\w*", path.read_text())
        imported = re.findall(r"from h2o_flexgen[\w.]* import .*\b_[a-z]\w*", path.read_text())
        assert private == imported == [], path
