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
