"""A model that runs layer by layer, with attention supplied by the caller."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from math import prod

import torch
from torch import Tensor

from h2o_flexgen.engine.model import LoadedModel
from h2o_flexgen.engine.sampling import score_rows
from h2o_flexgen.errors import UserError
from h2o_flexgen.formats.forms import forms
from h2o_flexgen.kernels.attention import PLAIN, Softmax
from h2o_flexgen.kernels.experts import Routing
from h2o_flexgen.machine import memory
from h2o_flexgen.machine.device import open_device
from h2o_flexgen.models.registry import family
from h2o_flexgen.models.rope import Positions
from h2o_flexgen.models.spec import ModelSpec, shapes_of, units_of
from h2o_flexgen.planning.workload import HEAD_ROWS
from h2o_flexgen.policy import MARGIN, gib
from h2o_flexgen.storage.disk import default_root
from h2o_flexgen.storage.transport import Transport
from h2o_flexgen.storage.weights import WeightStore
from h2o_flexgen.utils import interrupts

#: (layer, q (B, H, T, D), k (B, KV, T, D), v (B, KV, T, D)) -> context (B, H, T, D)
LayerAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
#: the same for one layer; of a family that has some, also the sinks (H,)
Attend = Callable[..., Tensor]
#: tensors as large as a layer's attention that a pass holds at once
MATRICES = 4
#: masks of one byte per step and token that are held at once
MASKS = 4


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """The bytes of a model whose weights are all of one dtype."""
    shapes = {name: shape for layer in family(spec.model_type).tensors(spec) for name, shape in layer.shapes.items()}
    return sum(map(prod, shapes.values())) * dtype.itemsize


def fits(spec: ModelSpec, dtype: torch.dtype, mem: int | None = None) -> bool:
    """Whether the weights take less than half of the free RAM, or of `mem` bytes if that is less."""
    free = memory.ram_available()
    return 2 * weight_bytes(spec, dtype) < (free if mem is None else min(free, mem))


def check_fits(spec: ModelSpec, dtype: torch.dtype, windows: int, prompt_len: int, gen_len: int) -> None:
    """Raises UserError unless RAM holds the weights, the keys and values of all windows, the masks of kept tokens, and
    the attention of a pass."""
    length = prompt_len + gen_len
    weights = weight_bytes(spec, dtype)
    places = windows * spec.layers * spec.kv_heads * length
    caches = places * (2 * spec.head_dim * dtype.itemsize + MASKS * gen_len)
    entries = spec.heads * max(length**2, windows * prompt_len**2)  # of the attention of one text, or of all prompts
    needed = weights + caches + MATRICES * entries * torch.float32.itemsize
    free = int(MARGIN * memory.ram_available())
    if needed > free:
        raise UserError(
            f"the analysis needs {gib(needed)} of RAM, of which {gib(weights)} for weights, and {gib(free)} are free: "
            "take a smaller model, fewer `windows`, or `dtype` bfloat16"
        )


def check_attention(spec: ModelSpec, tokens: int) -> None:
    """Raises UserError unless all layers have the same plain attention in texts of so many tokens: an analysis knows no
    other."""
    layers = {(each.heads, each.kv_heads, each.head_dim) for each in spec.kinds or (spec,)}
    softmaxes = {Softmax(each.scale, each.cap, each.window).within(tokens) for each in spec.kinds or (spec,)}
    has_sinks = any("sinks" in layer.streamed for layer in family(spec.model_type).tensors(spec))
    if len(layers) > 1 or softmaxes != {PLAIN} or has_sinks:
        what = "a sliding window shorter than the text, a soft cap, sinks, or a scale or heads of its own"
        raise UserError(f"this analysis is for plain attention, but some layer of the model has {what}")


class LayerModel:
    """Passes over a model on the CPU, with its weights in RAM.

    Args:
        streams: matrices stay on disk, and each layer is read when it is needed, until `close`.

    Raises:
        UserError: weights that cannot be read or are not finite.
    """

    def __init__(self, model: LoadedModel, progress: bool = True, streams: bool = False):
        self.spec = model.spec
        self._family = family(model.spec.model_type)
        transport = self._transport = Transport(open_device("cpu"), default_root(), overlap=False)
        units = units_of(model.layers)
        self._experts = [unit.experts for unit in units]
        numbers = iter(range(len(units)))
        self._head = len(units) - 1
        _, *self._units = [list(islice(numbers, len(layer.units))) for layer in model.layers]  # by layer
        try:
            shapes = shapes_of(model.layers)
            tiers = {name: "disk" if streams and len(shape) > 1 else "gpu" for name, shape in shapes.items()}
            formats = {name: model.source.format(name) for name in tiers}
            as_stored = forms(formats, model.dtype, head=model.layers[-1].streamed_shapes)[-1]
            self._weights = WeightStore(transport, model.dtype, units, as_stored, tiers, model.source, progress)
        finally:
            if not streams:
                transport.close()

    def close(self) -> None:
        """Stop reading layers."""
        self._transport.close()

    @torch.inference_mode()
    def run(self, ids: Tensor, first: int, attend: LayerAttend) -> Tensor:
        """Hidden states (B, T, E) after the last block, for tokens ids (B, T) at the positions from `first` on."""
        positions = (first + torch.arange(ids.shape[1])).expand(ids.shape)
        hidden = self.embed(ids, positions)
        for layer in range(self.spec.layers):
            hidden = self.block(layer, hidden, positions, partial(attend, layer))
        return hidden

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states (B, T, E) of tokens ids (B, T) at positions (B, T)."""
        at = _flat(positions)
        found = self._family.embed(self.spec, self._weights.get(0), self._weights.rows, ids.flatten(), at)
        return found.unflatten(0, ids.shape)

    def block(self, layer: int, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states (B, T, E) after a block. `attend`: q (B, H, T, D), k and v (B, KV, T, D), and sinks (H,) if the
        family has some, -> (B, H, T, D)."""
        interrupts.check()
        B, T = positions.shape

        def attend_flat(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
            qkv = (x.unflatten(0, (B, T)).transpose(1, 2) for x in (q, k, v))
            return attend(*qkv, *sinks).transpose(1, 2).flatten(0, 1)

        first, *others = self._units[layer]
        through = self._family.attention if others else self._family.block
        spec = self.spec.at(layer)
        w = self._weights.get(first)
        found = through(spec, w, hidden.flatten(0, 1), _flat(positions), attend_flat)
        if others:
            x, routing = self._family.route(spec, w, found)
            self._weights.release(first)  # the units of a layer share one staging buffer
            found = self._through_experts(spec, found, x, routing, others)
        return found.unflatten(0, (B, T))

    def _through_experts(
        self, spec: ModelSpec, hidden: Tensor, x: Tensor, routing: Routing, units: list[int]
    ) -> Tensor:
        """Hidden states (N, E) after the experts, which read x (N, E), and what comes after them, all in `units`."""
        total = torch.zeros_like(x)
        for number in units:
            w = self._weights.get(number)
            if group := self._experts[number]:
                routing.add(group, w, partial(self._family.expert, spec), x, total)
            else:
                hidden = self._family.join(spec, w, hidden, x, total)
            self._weights.release(number)
        return hidden.add_(total) if self._experts[units[-1]] else hidden

    def release(self, layer: int) -> None:
        """Free a layer's weights; they are read again when they are needed."""
        for number in self._units[layer]:
            self._weights.release(number)

    @torch.inference_mode()
    def logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities (B, T) fp32 of the tokens `targets` (B, T) that follow the states `hidden` (B, T, E)."""
        w = self._weights.get(self._head)
        rows = hidden.reshape(-1, hidden.shape[-1])
        found = []
        for states, tokens in zip(rows.split(HEAD_ROWS), targets.reshape(-1).split(HEAD_ROWS)):
            found += score_rows(self._family.logits(self.spec, w, states), tokens)[0]
        return torch.tensor(found).view(targets.shape)


def _flat(positions: Tensor) -> Positions:
    """Positions (B, T) as one flat row; each text ends at its last position."""
    return Positions(positions.flatten(), (positions.amax(1, keepdim=True) + 1).expand(positions.shape).flatten())
