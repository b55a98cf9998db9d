import sys

from h2o_flexgen.main import main

sys.exit(main(prog="python -m h2o_flexgen"))
