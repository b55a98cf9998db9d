import sys

from h2o_flexgen.commands.main import main

sys.exit(main(prog="python -m h2o_flexgen"))
