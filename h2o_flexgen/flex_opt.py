"""`python -m h2o_flexgen.flex_opt`: FlexGen's name for `h2o-flexgen generate`."""

import sys

from h2o_flexgen.commands.main import run_command

if __name__ == "__main__":
    sys.exit(run_command("generate", None, "python -m h2o_flexgen.flex_opt"))
