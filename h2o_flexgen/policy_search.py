"""`python -m h2o_flexgen.policy_search`: the historical name of `h2o-flexgen search`."""

import sys

from h2o_flexgen.commands.main import run_command

if __name__ == "__main__":
    sys.exit(run_command("search", None, "python -m h2o_flexgen.policy_search"))
