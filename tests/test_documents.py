"""README and docs say what the results say, and point to what is there."""

import re

import make_tables
import pytest
from make_tables import DOCUMENTS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_made_from_the_results(path):
    text = path.read_text()
    assert make_tables.fill(text) == text, "run scripts/make_tables.py"


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
            "systems": ["ours", "died"],
        }
        machine = {"processor": processor, "cores": 2, "ram_gib": 8, "gpu": None}
        run = {"system": "ours", "batch": 8, "gen_len": int(gen_len), "options": {}, "prefill": 1.0, "decode": 1.0}
        died = run | {"system": "died", "failed": "killed"}
        return {
            "row": job,
            "machine": machine,
            "date": date,
            "runs": [run | {"lowest_tier": "disk"}] * runs + [died],
        }

    old = [row("opt-1.3b 32 32", "a", "2026-11-01", 1), row("opt-6.7b 64 256", "a", "2026-11-01", 1)]
    new = [row("opt-1.3b 32 32", "b", "2026-11-02", 1), row("opt-30b 64 32", "b", "2026-11-02", 1)]
    assert make_tables.for_readme([*old, *new]) == [old[1], *new]
    oftener = row("opt-1.3b 32 32", "c", "2026-10-31", 3)
    assert make_tables.for_readme([oftener, *old, *new]) == [oftener, old[1], new[1]]
    unfinished = row("opt-1.3b 32 32", "c", "2026-11-03", 0)
    assert make_tables.for_readme([unfinished, *old]) == old
    assert make_tables.for_readme([]) == []
