"""`python -m h2o_flexgen.flex_opt`: FlexGen's name for `h2o-flexgen generate`."""

import sys

from h2o_flexgen.commands.generate import main

if __name__ == "__main__":
    sys.exit(main())
