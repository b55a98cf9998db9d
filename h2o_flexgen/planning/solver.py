"""The solver of linear programs, CBC, which comes with pulp."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from h2o_flexgen.errors import UserError

try:  # here, not where it is used: pulp keeps exceptions of its import, which hold the frames that imported it
    import pulp
except ImportError:  # a job with a policy of its own needs no solver
    pulp = None

#: begins the names of its folders
_PREFIX = "h2o_flexgen-lp-"
#: seconds after which a folder is of a process that has died
OLD = 3600


def solve(lp: pulp.LpProblem) -> bool:
    """Whether it has a solution. What CBC writes goes to a temporary folder.

    Raises:
        UserError: the solver cannot be run.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_root(tempfile.gettempdir())) as folder:
            solver = pulp.PULP_CBC_CMD(msg=False)
            solver.tmpDir = folder
            lp.solve(solver)
    except (pulp.PulpSolverError, OSError) as e:
        raise UserError(
            f"the policy search cannot run its solver ({e}): give a policy (the batch sizes and `percent`)"
        ) from None
    return lp.status != pulp.LpStatusInfeasible


@cache
def _root(base: str) -> Path:
    """Where the solver's folders go, cleared once of those that killed processes left."""
    root = Path("/tmp" if " " in base else base)  # pulp splits the command at blanks
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process removes it too
            if time.time() - folder.stat().st_mtime > OLD:
                shutil.rmtree(folder, ignore_errors=True)
    return root
