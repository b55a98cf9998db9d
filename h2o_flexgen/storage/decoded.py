"""A checkpoint whose quantised matrices are decoded once, when they are loaded: if all operands fit on the device, no
step has to decode."""

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

#: ends the name of a copy of a tensor
COPY = " (copy)"


class Decoding(NamedTuple):
    """A model whose quantised matrices are all decoded when they are loaded."""

    layers: list[Layer]
    formats: dict[str, Format]  # of these matrices, once decoded

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
        """Decode into what matmuls read. With `compute` int8 the embedding, in the first layer, stays as stored, since
        its rows are read as floats; a head tied to it becomes a copy under a name of its own, or without `copies` stays
        too."""
        quantised = {name: form for name, form in formats.items() if not form.is_dense}
        read = {name: matmul_format(form, dtype, compute, in_blocks) for name, form in quantised.items()}
        kept = quantised.keys() & layers[0].shapes if compute == "int8" else set()
        found = read | {name: quantised[name] for name in kept}
        head = dict(layers[-1].streamed)
        for short, (name, shape) in layers[-1].streamed.items():
            if copies and name in kept and read[name] != quantised[name]:
                head[short] = (name + COPY, shape)
                found[name + COPY] = Int8()
        return cls([*layers[:-1], replace(layers[-1], streamed=head)], found)


class Decoded:
    """A checkpoint whose quantised matrices are decoded when they are read, into `Decoding.formats`; none may be on
    disk."""

    def __init__(self, source: Checkpoint, formats: dict[str, Format]):
        self._source = source
        self._formats = formats
        self.on_disk = source.on_disk

    def format(self, name: str) -> Format:
        return self._formats.get(name) or self._source.format(name)

    def read(self, name: str, out: Tensor | Quantised, io: DiskIO) -> None:
        """Fill `out`, as `Checkpoint.read`."""
        form = self.format(name)
        name = name.removesuffix(COPY)
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
            whole.decode_into(out)
