"""Search policies for OPT-6.7B, 30B and 175B on the papers' T4, at the papers' three lengths, with and without H2O, and
write them to policies/."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from h2o_flexgen.commands.main import run_command  # noqa: E402

#: output tokens -> the ratio at which heavy + recent slots are 20 % of prompt + output, as in the H2O paper
LENGTHS = {32: 0.1, 512: 0.2, 1024: 0.3}


def main() -> None:
    for model in ("opt-6.7b", "opt-30b", "opt-175b"):
        for gen, ratio in LENGTHS.items():
            for name, budget in (("full", []), ("h2o", ["--hh-ratio", str(ratio), "--kv-rule", "h2o"])):
                words = ["--model", f"facebook/{model}", "--prompt-len", "512", "--gen-len", str(gen), *budget]
                words += ["--hardware", "policies/hardware/t4-16gb.json"]
                path = ROOT / "policies" / f"t4-{model}-512-{gen}-{name}.json"
                local = [str(ROOT / word) if word.startswith("policies/") else word for word in words]
                if run_command("search", [*local, "-o", str(path)], "h2o-flexgen search"):
                    sys.exit(1)
                made_by = shlex.join(["python", "-m", "h2o_flexgen.policy_search", *words])
                path.write_text(json.dumps({"made_by": made_by, **json.loads(path.read_text())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
