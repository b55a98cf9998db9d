"""The figures of docs/analysis.md, of the demo model on Python's language reference: docs/benchmarks/analysis_smollm2.json
and docs/analysis.png. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import common  # noqa: E402
from h2o_flexgen import analyse  # noqa: E402


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "analysis.json"
        code = analyse.main(["--output", str(result), "--plot", str(ROOT / "docs" / "analysis.png")])
        if code == 0:
            common.save("analysis_smollm2", json.loads(result.read_text()))
    return code


if __name__ == "__main__":
    sys.exit(main())
