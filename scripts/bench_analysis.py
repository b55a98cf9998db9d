"""Make the figures of docs/analysis.md from the demo model and Python's language reference. Needs the extra `plot`.

Results go to docs/benchmarks/analysis_smollm2.json and docs/analysis.png.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from PIL import Image  # noqa: E402  comes with matplotlib

from bench import common  # noqa: E402
from h2o_flexgen.commands.main import run_command  # noqa: E402

PLOT = ROOT / "docs" / "analysis.png"
#: a palette that makes the plot's file a quarter as large
COLOURS = 64


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "analysis.json"
        code = run_command("analyse", ["--output", str(result), "--plot", str(PLOT)], "h2o-flexgen analyse")
        if code == 0:
            Image.open(PLOT).quantize(COLOURS).save(PLOT, optimize=True)
            common.save("analysis_smollm2", json.loads(result.read_text()))
    return code


if __name__ == "__main__":
    sys.exit(main())
