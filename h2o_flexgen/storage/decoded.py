"""A checkpoint whose quantised matrices are decoded once, when they are loaded: where all that matmuls read fits on the
device, no step has to decode."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.formats import Format, Int8, Quantised
from h2o_flexgen.kernels.linear import matmul_format
from h2o_flexgen.models.spec import Layer
from h2o_flexgen.storage.checkpoint import Checkpoint
from h2o_flexgen.storage.disk import DiskIO
from h2o_flexgen.storage.stored import rows_of

#: what the name of a copy of a tensor ends with
COPY = " (copy)"


class Decoding(NamedTuple):
    """How a model is when its quantised matrices are all decoded once, when they are loaded.

    Attributes:
        layers: its tensors.
        formats: what these matrices become.
    """

    layers: list[Layer]
    formats: dict[str, Format]

    @classmethod
    def of(
        cls,
        formats: dict[str, Format],
        layers: list[Layer],
        dtype: torch.dtype,
        compute: str,
        in_blocks: bool,
        copies: bool = True,
    ) -> Decoding:
        """Into what matmuls read. For matmuls in int8 the embedding, in the first layer, stays as it is stored, since
        its rows are floats; a head that is tied to it becomes a copy with a name of its own, or without `copies` stays
        too."""
        quantised = {name: form for name, form in formats.items() if not form.is_dense}
        kept = quantised.keys() & layers[0].shapes if compute == "int8" else set()
        read = {name: matmul_format(form, dtype, compute, in_blocks) for name, form in quantised.items()}
        found = {name: form if name in kept else read[name] for name, form in quantised.items()}
        tied = {short: t for short, t in layers[-1].streamed.items() if t[0] in kept and read[t[0]] != found[t[0]]}
        tied = tied if copies else {}
        head = {short: (name + COPY, shape) for short, (name, shape) in tied.items()}
        found |= {name: Int8() for name, _ in head.values()}
        return cls([*layers[:-1], replace(layers[-1], streamed=layers[-1].streamed | head)], found)


class Decoded:
    """A checkpoint whose quantised matrices are decoded when they are read, into those of `Decoding.formats`; none may
    be on disk."""

    def __init__(self, source: Checkpoint, formats: dict[str, Format]):
        self._source = source
        self._formats = formats
        self.on_disk = source.on_disk

    def format(self, name: str) -> Format:
        return self._formats.get(name) or self._source.format(name)

    def read(self, name: str, out: Tensor | Quantised, io: DiskIO) -> None:
        """Fill `out`, as `Checkpoint.read`."""
        form, name = self.format(name), name.removesuffix(COPY)
        stored = self._source.find(name)
        if form == stored.format:
            self._source.read(name, out, io)
        elif isinstance(out, Tensor) and not out.is_cuda:  # without a second matrix in RAM
            for begin, rows in rows_of(stored, io):
                rows.decode(out[begin : begin + rows.shape[0]])
        else:
            raw = torch.empty(stored.nbytes, dtype=torch.uint8, device=out.device)
            whole = stored.format.view(raw, tuple(out.shape))
            self._source.read(name, whole, io)
            whole.into(out)
