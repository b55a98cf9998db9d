"""Rotary position embeddings: from a config, and applied to queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.errors import UserError
from h2o_flexgen.models.spec import Config, ModelSpec, Rope, shortened

#: type -> the parameters that it needs
TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
}
#: other names of types
ALIASES = {"su": "longrope"}
#: types whose frequencies follow the length of the text
BY_LENGTH = ("dynamic", "longrope")
ORIGINAL = "original_max_position_embeddings"
#: the most tokens whose cos and sin are kept for the next layer: those of a decode step
KEPT_TOKENS = 128


def read_rope(
    config: Config, head_dim: int, theta_key: str = "rope_theta", partial: float | None = None, positions: int = 2048
) -> tuple[Rope, int]:
    """The RoPE of a config in its old spelling (`rope_theta`, `rope_scaling`) or its new one (`rope_parameters`), and
    the most positions that it takes the model to.

    Args:
        theta_key: the old name of theta.
        partial: the part of a head that is rotated, unless `rope_parameters` says otherwise; None for families that
            always rotate whole heads.
        positions: the family's default of `max_position_embeddings`.
    """
    data = config.data.get("rope_scaling") or config.data.get("rope_parameters") or {}
    if not isinstance(data, dict):
        raise config.error(f"rope_scaling must be an object, not {shortened(data)}")
    given = Config(data, f"{config.where}, RoPE")
    type_ = given.text("rope_type", given.text("type", "default"))
    type_ = ALIASES.get(type_, type_)
    if type_ not in TYPES:
        raise config.error(f"the RoPE type {shortened(type_)} is not supported; known: {', '.join(TYPES)}")
    for key in TYPES[type_]:
        given.number(key)
    positions = config.size("max_position_embeddings", positions)
    dim = head_dim if partial is None else int(head_dim * given.number("partial_rotary_factor", partial))
    if not 0 < dim <= head_dim or dim % 2:
        raise config.error(f"RoPE cannot rotate {dim} of {head_dim} elements of a head")
    scaling = {k: v for k, v in data.items() if k not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")}
    original = positions
    if type_ in ("llama3", "yarn", "longrope"):
        original = scaling[ORIGINAL] = config.size(ORIGINAL, given.size(ORIGINAL, positions))
    if type_ == "longrope":
        scaling |= _longrope(given, dim, positions, original)
    longest = positions if type_ in ("default", "llama3", "longrope") else int(given.number("factor") * original)
    theta = given.number("rope_theta", config.number(theta_key, 10000.0))
    try:
        rope = Rope(type_, theta, dim, positions, tuple(sorted(scaling.items())))
        for length in (1, max(positions, longest)):
            each, scale = frequencies(rope, length)
            if not torch.isfinite(each * scale).all():
                raise ValueError("the frequencies are not finite")
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as e:
        raise config.error(f"the RoPE parameters {shortened(data)} make no sense ({e!r})") from None
    return rope, max(positions, longest)


def _longrope(given: Config, dim: int, positions: int, original: int) -> dict:
    """The parameters of LongRoPE (arXiv 2402.13753): divisors of each frequency for texts up to the `original` length
    and for longer ones, and a factor for the rotated vectors, which transformers' versions derive differently."""
    factor = given.number("factor", positions / original)
    stretch = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    found = {name: given.numbers(name, dim // 2) for name in ("short_factor", "long_factor")}
    return found | {"attention_factor": given.number("attention_factor", stretch)}


@lru_cache(maxsize=64)
def frequencies(rope: Rope, length: int) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair (dim / 2,) fp32, and a factor for the rotated vectors, by transformers'
    own functions. `length`: tokens of the text so far, which only the types in BY_LENGTH look at."""
    powers = rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim)
    if rope.type == "default":
        return 1.0 / powers, 1.0
    if rope.type == "longrope":  # in some versions of transformers the length does not count
        scaling = dict(rope.scaling)
        divisors = scaling["long_factor" if length > scaling[ORIGINAL] else "short_factor"]
        return 1.0 / (torch.tensor(divisors) * powers), scaling["attention_factor"]
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": rope.type, "rope_theta": rope.theta, **dict(rope.scaling)}
    config = SimpleNamespace(
        head_dim=rope.dim,
        hidden_size=rope.dim,
        num_attention_heads=1,
        max_position_embeddings=rope.positions,
        rope_theta=rope.theta,
        rope_scaling=parameters,  # the names of transformers before 5
        rope_parameters=parameters,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[rope.type](config, torch.device("cpu"), seq_len=length)


def unchanged(rope: Rope) -> float:
    """Up to this length of a text its tokens are rotated as those of a shorter one."""
    if rope.type not in BY_LENGTH:
        return math.inf
    return rope.positions if rope.type == "dynamic" else dict(rope.scaling)[ORIGINAL]


@dataclass(frozen=True, eq=False)
class Positions:
    """Where tokens stand in their texts: (N,) int64 on the CPU each.

    Attributes:
        at: of each token.
        ends: tokens of its text so far, the last ones of a prompt included; some kinds of RoPE turn by them.
    """

    at: Tensor
    ends: Tensor
    _turns: dict = field(default_factory=dict)

    def turns(self, rope: Rope, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (N, 1, pairs) of all tokens, of the type and on the device of `like`. All layers have the same:
        those of a decode step, where computing them takes longer than the rotation, are kept."""
        key = rope, like.dtype, like.device
        if key in self._turns:
            return self._turns[key]
        each, scale = self._frequencies(rope)
        angles = (self.at.float()[:, None] * each)[:, None]
        cos, sin = ((f(angles) * scale).to(like.device, like.dtype) for f in (torch.cos, torch.sin))
        if len(self.at) <= KEPT_TOKENS:
            self._turns[key] = cos, sin
        return cos, sin

    def _frequencies(self, rope: Rope) -> tuple[Tensor, float]:
        """`frequencies`, of each token where they follow the length of its text, whatever its neighbours' are."""
        if rope.type not in BY_LENGTH:
            return frequencies(rope, rope.positions)
        lengths = self.ends
        if rope.type == "dynamic":
            lengths = lengths.clamp(min=rope.positions)
        else:
            original = dict(rope.scaling)[ORIGINAL]
            lengths = lengths.clamp(original, original + 1)  # there are two sets of frequencies
        lengths, text = lengths.unique(return_inverse=True)
        found, factors = zip(*(frequencies(rope, length) for length in lengths.tolist()))
        return torch.stack(found)[text], factors[0]


def rotation(rope: Rope | None, positions: Positions | None, like: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that rotates queries or keys (N, H, D), of the type and on the device of `like`, to their positions.
    Without RoPE it returns them as they are; for None, where `attend` rotates, in the order that `rotate_to` takes."""
    if rope is None:
        return lambda x: x
    if positions is None:
        return lambda x: _in_pairs(x, rope.dim)
    cos, sin = positions.turns(rope, like)
    return lambda x: _rotated(x, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (N, H, D) with each head's first elements rotated in pairs by cos and sin (N, 1, pairs), the rest as it is."""
    half = cos.shape[-1]
    dim = 2 * half
    out = torch.empty_like(x)
    first = x[..., :half]
    second = x[..., half:dim]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:dim]).addcmul_(first, sin)
    out[..., dim:] = x[..., dim:]
    return out


# position rolling: positions are ranks among the tokens that a cache holds


def rollable(spec: ModelSpec) -> Rope:
    """The RoPE of a model whose positions can roll.

    Raises:
        UserError: there is none, or it turns a token by the length of the whole text.
    """
    if spec.rope is None:
        raise UserError(f"`position_rolling` needs RoPE: {spec.model_type}'s positions are in its embeddings")
    if spec.rope.type in BY_LENGTH:
        turns = f"the RoPE type {spec.rope.type} turns tokens by the length of the text"
        raise UserError(f"`position_rolling`: {turns}, which has no end")
    return spec.rope


def _in_pairs(x: Tensor, dim: int) -> Tensor:
    """x (N, H, D) with the two elements of each rotated pair side by side: a complex number, which turns in one
    multiplication. The order of elements does not matter to products of queries and keys."""
    return torch.cat([x[..., :dim].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), x[..., dim:]], -1)


def rotate_to(rope: Rope, x: Tensor, positions: Tensor, end: int) -> Tensor:
    """x (B, H, T, D), queries or keys in pairs, rotated to positions (B, H or 1, T) on its device, all of them before
    `end`."""
    # powers of two: few tables, whatever is asked for; `embedding` takes a tenth of the time of an index
    turns = F.embedding(positions, _table(rope, 1 << (end - 1).bit_length(), x.device))
    turned = x[..., : rope.dim].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    _complex(turned).mul_(_complex(turns))
    turned = turned.to(x.dtype)
    return turned if rope.dim == x.shape[-1] else torch.cat([turned, x[..., rope.dim :]], -1)


def _complex(x: Tensor) -> Tensor:
    """Pairs of elements as complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # a tensor of that mode could not be used outside it
def _table(rope: Rope, count: int, device: torch.device) -> Tensor:
    """(count, dim) fp32: cos and sin of each pair, by turns, at the positions 0 to `count`."""
    each, scale = frequencies(rope, rope.positions)
    angles = torch.arange(count).float()[:, None] * each
    return (torch.stack([torch.cos(angles), torch.sin(angles)], -1).flatten(1) * scale).to(device)
