"""The only chooser of a policy."""

from __future__ import annotations

from h2o_flexgen.errors import UserError


def cap_limits(there: dict[str, int], caps: dict[str, int | None], shared: bool) -> dict[str, int]:
    """What may be planned for on each tier: what is there, within what the user allows. `shared`: gpu and cpu are the
    same RAM, whose whole is the limit "ram"."""
    limits = {tier: nbytes if caps[tier] is None else min(nbytes, caps[tier]) for tier, nbytes in there.items()}
    return limits | ({"ram": there["cpu"]} if shared else {})


def check_cpu_cap(caps: dict[str, int | None], shared: bool, searched: bool) -> None:
    """Raises UserError for a cap that a search would never come near: where gpu and cpu are the same RAM (`shared`), it
    puts nothing on the cpu tier."""
    if searched and shared and caps["cpu"] is not None:
        raise UserError(
            "--cpu-mem does nothing here: without CUDA the RAM is the gpu tier, so use --gpu-mem; the cpu tier is a "
            "second pool in RAM for --percent"
        )
