"""`python -m h2o_flexgen.lm_eval`: the historical name of `h2o-flexgen lm_eval`."""

import sys

from h2o_flexgen.commands.main import run_command
from h2o_flexgen.evaluation.harness import HarnessLM  # noqa: F401  its import registers it with the harness

if __name__ == "__main__":
    sys.exit(run_command("lm_eval", None, "python -m h2o_flexgen.lm_eval"))
