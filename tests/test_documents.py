"""README and docs say what the results say, and point to what is there."""

import os
import re
import shutil
import subprocess

import make_tables
import pytest
import throughput_rows
from bench_common import ROOT
from make_tables import DOCUMENTS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_made_from_the_results(path):
    text = path.read_text()
    assert make_tables.fill(text) == text, "run scripts/make_tables.py"


def test_an_old_python_is_refused_before_anything_is_set_up(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    argv = ["bash", tmp_path / "scripts" / "demo.sh"]
    done = subprocess.run(argv, env={**os.environ, "PYTHON": "false"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: false is not Python 3.11 or later")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


def test_the_readme_shows_a_row_where_it_was_measured_oftenest():
    def row(job: str, processor: str, date: str, runs: int) -> dict:
        model, prompt_len, gen_len = job.split()
        job = {
            "model": f"facebook/{model}",
            "prompt_len": int(prompt_len),
            "gen_len": int(gen_len),
            "cap": None,
            "device": "cpu",
            "systems": ["ours, H2O", "died"],
            "runs": 3,
        }
        machine = {"processor": processor, "cores": 2, "ram_gib": 8, "gpu": None}
        died = made("died", int(gen_len), date) | {"failed": "killed"}
        done = [made("ours, H2O", int(gen_len), date)] * runs
        return {"row": job, "machine": machine, "runs": [*done, died]}

    old = [row("opt-1.3b 32 32", "a", "2026-11-01", 1), row("opt-6.7b 64 256", "a", "2026-11-01", 1)]
    new = [row("opt-1.3b 32 32", "b", "2026-11-02", 1), row("opt-30b 64 32", "b", "2026-11-02", 1)]
    assert make_tables.for_readme([*old, *new]) == [old[1], *new]
    oftener = row("opt-1.3b 32 32", "c", "2026-10-31", 3)
    assert make_tables.for_readme([oftener, *old, *new]) == [oftener, old[1], new[1]]
    enough = row("opt-1.3b 32 32", "d", "2026-10-30", 4)
    assert make_tables.for_readme([oftener, enough]) == [oftener]
    swept = row("opt-1.3b 32 32", "d", "2026-10-30", 3)
    swept["runs"].append(made("ours, H2O", 32, "2026-11-03") | {"options": {"block": [8, 1]}})
    assert make_tables.for_readme([oftener, swept]) == [oftener]
    longer = row("opt-1.3b 32 32", "d", "2026-11-02", 1)  # ended on the day of new[0], begun before it
    longer["runs"].append(made("died", 32, "2026-11-01") | {"failed": "killed"})
    assert make_tables.for_readme([longer, new[0]]) == [new[0]]
    unfinished = row("opt-1.3b 32 32", "c", "2026-11-03", 0)
    assert make_tables.for_readme([unfinished, *old]) == old
    assert make_tables.for_readme([]) == []


def made(system: str, gen_len: int, date: str) -> dict:
    run = {"system": system, "batch": 8, "gen_len": gen_len, "options": {}, "date": date}
    return run | {"prefill": 1.0, "decode": 1.0, "lowest_tier": "disk"}


def test_a_row_counts_the_rounds_of_all_systems():
    peer, ours = made("Accelerate", 32, ""), made("ours, H2O", 32, "")
    probe, dead = peer | {"gen_len": 8}, {"failed": "killed"}

    def rounds(*runs: dict) -> int:
        row = {"systems": ["Accelerate", "ours, H2O"], "gen_len": 32, "runs": 3}
        return throughput_rows.rounds({"row": row, "runs": list(runs)})

    assert rounds(peer, ours, ours) == 1
    assert rounds(*[peer, ours] * 4) == 3
    assert rounds(ours) == rounds(ours, probe) == rounds(ours, probe, probe | dead | {"batch": 16}) == 0
    assert rounds(ours, probe | dead) == rounds(ours, probe, peer | dead) == 1
    assert rounds(peer, ours | dead) == 0
