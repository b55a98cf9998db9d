"""Experts that lie in one tensor for all of a layer, as gpt-oss has them, seen as tensors of each expert.

`gate_up_proj` has the outputs of gate and up in turns, `down_proj` only its own:

    experts.gate_up_proj          (E, inputs, outputs)              floats
    experts.gate_up_proj_bias     (E, outputs)
    experts.gate_up_proj_blocks   (E, outputs, inputs / 32, 16)     MXFP4
    experts.gate_up_proj_scales   (E, outputs, inputs / 32)
"""

from __future__ import annotations

import re
from typing import NamedTuple

from h2o_flexgen.storage.stored import Part, Stored

#: names of such tensors
FUSED_NAME = re.compile(r".*\bexperts\.(gate_up|down)_proj(_bias|_blocks|_scales)?")
#: names of a tensor of one expert: before its number, the number, the module, and what it is of that
EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate|up|down)_proj(\.weight|\.bias|_blocks|_scales)")
#: (tensor, its outputs) of each module
OUTPUTS = {
    "gate": ("gate_up_proj", slice(0, None, 2)),
    "up": ("gate_up_proj", slice(1, None, 2)),
    "down": ("down_proj", slice(None)),
}
SUFFIXES = {".weight": "", ".bias": "_bias"}


class Place(NamedTuple):
    """Where a tensor of one expert is."""

    name: str  # of the tensor that has it
    expert: int
    outputs: slice
    is_transposed: bool

    def of(self, stored: Stored) -> Part | None:
        """The tensor of the expert; None if there is none of its number."""
        if self.expert >= stored.shape[0]:
            return None
        return Part(stored.entry(self.expert), self.outputs, self.is_transposed)


def place_of(name: str) -> Place | None:
    """Where the tensor of an expert is, by its full name; None for other tensors."""
    found = EXPERT.fullmatch(name)
    if found is None:
        return None
    before, number, module, suffix = found.groups()
    tensor, outputs = OUTPUTS[module]
    return Place(f"{before}.{tensor}{SUFFIXES.get(suffix, suffix)}", int(number), outputs, suffix == ".weight")
