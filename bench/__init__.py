"""The comparison with other systems: rows, systems, results, tables."""

import h2o_flexgen  # noqa: F401, before torch: it sets how long torch's threads spin
