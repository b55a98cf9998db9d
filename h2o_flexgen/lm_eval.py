"""`python -m h2o_flexgen.lm_eval`: the historical name of `h2o-flexgen lm_eval`."""

import sys

from h2o_flexgen.commands.lm_eval import main

if __name__ == "__main__":
    sys.exit(main())
