"""What the engine knows about a model: its sizes and the tensors of each layer. Pure data, no torch."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from h2o_flexgen.errors import UserError

#: upper bound of a size in a config, so that no product of three overflows a float
LARGEST = (1 << 31) - 1
#: far more than any model has, so that a list of layers or a table of a head's elements cannot fill memory
MOST_LAYERS = 1000
MOST_HEAD_DIM = 1 << 16
#: the most elements of a group of experts, unless one of them has more: in 4 bits reads of some 10 MB for each matrix
GROUP_ELEMENTS = 1 << 26
#: begins the short names of a router's tensors
ROUTER = "router."
#: types of layers in configs: those that see all earlier tokens, and those with a sliding window
FULL = "full_attention"
SLIDING = "sliding_attention"
_SHORT = reprlib.Repr()
_SHORT.maxstring = 80
#: {short name: (name in the checkpoint, shape)}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Rope:
    """The rotary position embeddings of a head (RoFormer, arXiv 2104.09864)."""

    type: str  # "default", "linear", "dynamic", "llama3", "yarn", "longrope" or "proportional", as in transformers
    theta: float  # the base of the frequencies
    dim: int  # elements of a head that are rotated (all, unless rotation is partial; some by 0 if it is proportional)
    positions: int  # `max_position_embeddings` of the config
    scaling: tuple[tuple[str, object], ...] = ()  # parameters of the type, by transformers' names


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a model. A family may add its own fields."""

    model_type: str  # the family, as in checkpoints
    layers: int  # transformer blocks, not counting embedding and head
    hidden: int  # width of the hidden states
    inner: int  # width of the MLP
    vocab: int
    heads: int  # query heads
    kv_heads: int  # heads of K and V; divides `heads`
    head_dim: int  # elements of a head
    positions: int  # the most tokens of a prompt and its output together
    activation: str  # transformers' name of the MLP's activation function
    eos: frozenset[int] = frozenset()  # token ids that end a text
    gated: bool = False  # the MLP has a third matrix, its gate
    tied: bool = False  # the head is the embedding
    window: int | None = None  # sliding window of attention, in tokens, if any
    rope: Rope | None = None
    scale: float | None = None  # of products of queries and keys; default: head_dim ** -0.5
    cap: float | None = None  # of these products: x becomes cap * tanh(x / cap)
    experts: int = 0  # of a layer with a mixture of experts
    active: int = 0  # experts that a token goes through
    expert_inner: int = 0  # width of an expert
    shared_inner: int = 0  # width of the expert that all tokens go through
    kinds: tuple[ModelSpec, ...] = ()  # of layers, if they differ: in window, RoPE, heads
    pattern: tuple[int, ...] = ()  # which of `kinds` each layer is

    def at(self, layer: int) -> ModelSpec:
        """The sizes of one layer."""
        return self.kinds[self.pattern[layer]] if self.kinds else self

    def touched(self, tokens: float) -> float:
        """The expected fraction of a layer's experts that some of these tokens go through."""
        return 1 - (1 - self.active / self.experts) ** tokens

    @property
    def state_width(self) -> int:
        """Elements of a token between two stages; with experts also what these read, and the sum of their outputs."""
        return self.hidden * (3 if self.experts else 1)

    @property
    def head_dims(self) -> set[int]:
        """The sizes of heads of all layers."""
        return {kind.head_dim for kind in self.kinds or (self,)}

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of each layer."""
        return [self.at(layer).window for layer in range(self.layers)]

    @property
    def groups(self) -> int:
        """Query heads that share a head of K and V."""
        return self.heads // self.kv_heads

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def check_length(self, prompt_len: int, gen_len: int = 0, rolling: bool = False) -> None:
        """Raises UserError for lengths of a prompt and its output that exceed the model's. With `rolling` positions the
        output has no limit. Without an output the prompt is a text to be scored, whose last token is never an input."""
        is_longer = f"the text has {prompt_len} tokens, more than the model's"
        needed = prompt_len - 1
        if gen_len and rolling:
            is_longer = f"prompt of {prompt_len} tokens is longer than the model's"
            needed = prompt_len
        elif gen_len:
            is_longer = f"prompt of {prompt_len} tokens + output of {gen_len} is longer than the model's"
            needed = prompt_len + gen_len
        if needed > self.positions:
            raise UserError(f"{is_longer} {self.positions} positions")


def of_layers(layers: Sequence[ModelSpec]) -> ModelSpec:
    """The spec of a model from those of its layers. Where these differ, its own sizes are those of the kind that comes
    last."""
    kinds = tuple(dict.fromkeys(layers))
    return kinds[0] if len(kinds) == 1 else replace(kinds[-1], kinds=kinds, pattern=tuple(map(kinds.index, layers)))


@dataclass(frozen=True)
class Unit:
    """Tensors that are staged and used together: a layer, a group of its experts, or what is before or after these."""

    streamed: Tensors = field(default_factory=dict)  # needed whole
    gathered: Tensors = field(default_factory=dict)  # needed row by row
    experts: range = range(0)  # those that it holds, one below the other in each of its matrices

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name in the checkpoint: shape} of all tensors."""
        return dict((*self.streamed.values(), *self.gathered.values()))

    @cached_property
    def streamed_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.streamed.values())


@dataclass(frozen=True)
class Layer:
    """The tensors of a layer: the embedding, a transformer block, or the head.

    Attributes:
        streamed, gathered: as of a `Unit`; without those of experts.
        expert: the tensors of one expert, with {} in their names for its number.
        experts: how many there are.
        after: tensors that are needed after the experts.
    """

    streamed: Tensors = field(default_factory=dict)
    gathered: Tensors = field(default_factory=dict)
    expert: Tensors = field(default_factory=dict)
    experts: int = 0
    after: Tensors = field(default_factory=dict)

    @cached_property
    def units(self) -> list[Unit]:
        """The layer up to its experts, these in groups of up to GROUP_ELEMENTS elements, and what comes after them."""
        each = sum(prod(shape) for _, shape in self.expert.values())
        size = max(1, GROUP_ELEMENTS // max(1, each))
        groups = [range(begin, min(begin + size, self.experts)) for begin in range(0, self.experts, size)]
        stacked = [Unit(self._stacked(group), {}, group) for group in groups]
        return [Unit(self.streamed, self.gathered), *stacked, *([Unit(self.after)] if self.after else [])]

    def _stacked(self, group: range) -> Tensors:
        """The tensors of some experts, below each other."""
        number = f"{group.start}:{group.stop}"
        tensors = self.expert.items()
        return {short: (name.format(number), (len(group) * out, *width)) for short, (name, (out, *width)) in tensors}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name in the checkpoint: shape} of all tensors."""
        return shapes_of(self.units)

    @property
    def compressible(self) -> dict[str, tuple[int, ...]]:
        """`shapes` of the tensors that may be kept in fewer bits: all but a router's, which decide too much."""
        whole = (self.streamed | self.after).items()
        routers = {name for short, (name, _) in whole if short.startswith(ROUTER)}
        return {name: shape for name, shape in self.shapes.items() if name not in routers}

    @cached_property
    def streamed_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for unit in self.units for name, shape in unit.streamed_shapes.items()}


def shapes_of(layers: Iterable[Layer | Unit]) -> dict[str, tuple[int, ...]]:
    """{name in the checkpoint: shape} of all tensors of some layers or units."""
    return {name: shape for layer in layers for name, shape in layer.shapes.items()}


def units_of(layers: Iterable[Layer]) -> list[Unit]:
    """All units, in the order in which a pass needs them."""
    return [unit for layer in layers for unit in layer.units]


def matrix(short: str, name: str, out: int, columns: int, bias: bool = False) -> Tensors:
    """A linear layer: weight (out, columns) and, if it has one, bias (out,)."""
    weight = {f"{short}.weight": (f"{name}.weight", (out, columns))}
    return weight | ({f"{short}.bias": (f"{name}.bias", (out,))} if bias else {})


def vectors(short: str, name: str, size: int, parts: Iterable[str] = ("weight",)) -> Tensors:
    """A norm's vectors."""
    return {f"{short}.{part}": (f"{name}.{part}", (size,)) for part in parts}


def shortened(value) -> str:
    """A value from a file for a message, cut if it is long."""
    return _SHORT.repr(value)


class Config:
    """A checkpoint's config.json, called `where` in messages. Methods raise UserError for values that are missing or of
    the wrong type."""

    def __init__(self, data: dict, where: str = "the config"):
        self.data = data
        self.where = where

    def error(self, what: str) -> UserError:
        return UserError(f"{self.where}: {what}")

    def _checked(self, key: str, value, what: str, fits: Callable[[object], bool]):
        if not fits(value):
            raise self.error(f"{key} must be {what}, not {shortened(value)}")
        return value

    def _number(self, key: str, default):
        """null counts as missing."""
        return default if self.data.get(key) is None else self.data[key]

    def size(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        fits = lambda n: type(n) is int and least <= n <= most
        return self._checked(key, self._number(key, default), f"a whole number from {least} to {most}", fits)

    def number(self, key: str, default: float | None = None) -> float:
        fits = lambda x: type(x) in (int, float) and 0 < x < 1e300
        return float(self._checked(key, self._number(key, default), "a positive number", fits))

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        is_number = lambda x: type(x) in (int, float) and 0 < x < 1e300
        fits = lambda value: isinstance(value, list) and len(value) == count and all(map(is_number, value))
        return tuple(map(float, self._checked(key, self.data.get(key), f"a list of {count} positive numbers", fits)))

    def flag(self, key: str, default: bool) -> bool:
        return self._checked(key, self.data.get(key, default), "true or false", lambda x: isinstance(x, bool))

    def text(self, key: str, default: str) -> str:
        return self._checked(key, self.data.get(key, default), "a text", lambda x: isinstance(x, str))

    def tokens(self, key: str, default: int | None = None) -> frozenset[int]:
        """Token ids: none, one or a list."""
        value = self.data.get(key, default)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        what = "a token id or a list of them"
        return frozenset(self._checked(key, ids, what, lambda ids: all(type(token) is int for token in ids)))

    def window(self, default: int | None = None) -> int | None:
        """Tokens of the sliding window; None for null."""
        return None if self.data.get("sliding_window", default) is None else self.size("sliding_window", default)

    def active(self, key: str, default: int | None, experts: int) -> int:
        """How many of `experts` experts a token goes through."""
        count = self.size(key, default)
        if count > experts > 0:
            raise self.error(f"{key} is {count}, but there are only {experts} experts")
        return count

    def layer_types(self, slides: Callable[[int], bool]) -> list[str]:
        """FULL or SLIDING for each layer; without `layer_types` by its index."""
        layers = self.size("num_hidden_layers", most=MOST_LAYERS)
        types = self.data.get("layer_types")
        if types is None:
            return [SLIDING if slides(index) else FULL for index in range(layers)]
        what = f"a list of {layers} times {FULL} or {SLIDING}"
        self._checked("layer_types", types, what, lambda value: isinstance(value, list) and len(value) == layers)
        return self._checked("layer_types", types, what, lambda value: all(kind in (FULL, SLIDING) for kind in value))

    def sizes(self, kv_heads: int | None = None, head_dim: int | None = None, grouped: bool = True) -> dict[str, int]:
        """The fields of a spec whose keys are the same in all families. `kv_heads` and `head_dim` are a family's
        defaults for missing keys; null for `num_key_value_heads` means one per query head. A family without `grouped`
        heads reads neither of the two."""
        if not grouped:
            read = {k: v for k, v in self.data.items() if k not in ("num_key_value_heads", "head_dim")}
            return Config(read, self.where).sizes()
        hidden = self.size("hidden_size")
        heads = self.size("num_attention_heads")
        left_out = "num_key_value_heads" not in self.data
        kv_heads = self.size("num_key_value_heads", (left_out and kv_heads) or heads)
        if heads % kv_heads:
            raise self.error(f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}")
        if self.data.get("head_dim", head_dim) is None and hidden % heads:
            raise self.error(f"hidden_size {hidden} is not divisible by num_attention_heads {heads}")
        head_dim = self.size("head_dim", head_dim or max(1, hidden // heads), most=MOST_HEAD_DIM)
        layers = self.size("num_hidden_layers", most=MOST_LAYERS)
        vocab = self.size("vocab_size")
        return dict(layers=layers, hidden=hidden, vocab=vocab, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
