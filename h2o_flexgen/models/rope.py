"""Rotary position embeddings: read from a config, and applied to queries and keys."""

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
from h2o_flexgen.kernels import rowwise
from h2o_flexgen.models.spec import Config, ModelSpec, Rope, shortened

#: type -> required parameters
TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
    "proportional": (),
}
#: other names of types
ALIASES = {"su": "longrope"}
#: types whose frequencies depend on the length of the text
BY_LENGTH = ("dynamic", "longrope")
#: types that stretch the trained positions by a factor
STRETCHED = ("linear", "dynamic", "yarn")
ORIGINAL = "original_max_position_embeddings"
#: the most tokens whose cos and sin are kept for the next layers: enough for a decode step
KEPT_TOKENS = 128


def read_rope(
    config: Config,
    head_dim: int,
    theta_key: str = "rope_theta",
    partial: float | None = None,
    positions: int = 2048,
    theta: float = 10000.0,
) -> tuple[Rope, int]:
    """The RoPE of a config in the old spelling (`rope_theta`, `rope_scaling`) or the new one (`rope_parameters`), and
    the number of positions that the model has with it.

    Args:
        theta_key: theta's key in the old spelling.
        partial: default of the fraction of a head that is rotated; None for families that always rotate whole heads.
        positions, theta: the family's defaults of `max_position_embeddings` and of theta.

    Raises:
        UserError: an unknown type, or parameters that are missing, invalid or give infinite angles.
    """
    data = config.data.get("rope_scaling") or config.data.get("rope_parameters") or {}
    if not isinstance(data, dict):
        raise config.error(f"rope_scaling must be an object, not {shortened(data)}")
    given = Config(data, f"{config.where}, RoPE")
    type_ = _type(config, given)
    positions = config.size("max_position_embeddings", positions)
    whole = partial is None or type_ == "proportional"
    dim = head_dim if whole else int(head_dim * given.number("partial_rotary_factor", partial))
    if not 0 < dim <= head_dim or dim % 2:
        raise config.error(f"RoPE cannot rotate {dim} of {head_dim} elements of a head")
    scaling = {k: v for k, v in data.items() if k not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")}
    original = positions
    if type_ in ("llama3", "yarn", "longrope"):
        original = scaling[ORIGINAL] = config.size(ORIGINAL, given.size(ORIGINAL, positions))
    if type_ == "longrope":
        scaling |= _longrope(given, dim, positions, original)
    if type_ == "proportional":
        scaling |= _proportional(given, partial)
    longest = int(given.number("factor") * original) if type_ in STRETCHED else positions
    theta = given.number("rope_theta", config.number(theta_key, theta))
    try:
        rope = Rope(type_, theta, dim, positions, tuple(sorted(scaling.items())))
        for length in (1, max(positions, longest)):
            each, scale = frequencies(rope, length)
            if not torch.isfinite(each * scale).all():
                raise ValueError("the frequencies are not finite")
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as e:
        raise config.error(f"the RoPE parameters {shortened(data)} make no sense ({e!r})") from None
    return rope, max(positions, longest)


def _type(config: Config, given: Config) -> str:
    """The type of RoPE that is `given`, whose parameters are numbers."""
    type_ = given.text("rope_type", given.text("type", "default"))
    type_ = ALIASES.get(type_, type_)
    if type_ not in TYPES:
        raise config.error(f"the RoPE type {shortened(type_)} is not supported; known: {', '.join(TYPES)}")
    for key in TYPES[type_]:
        given.number(key)
    return type_


def _longrope(given: Config, dim: int, positions: int, original: int) -> dict:
    """The parameters of LongRoPE (arXiv 2402.13753): divisors of each frequency, for texts up to the `original` length
    and for longer ones, and a factor of the rotated vectors, which versions of transformers derive differently."""
    factor = given.number("factor", positions / original)
    stretch = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    found = {name: given.numbers(name, dim // 2) for name in ("short_factor", "long_factor")}
    return found | {"attention_factor": given.number("attention_factor", stretch)}


def _proportional(given: Config, partial: float | None) -> dict:
    """The parameters of Gemma 4's RoPE: the share of a whole head's pairs that are rotated, and a divisor of the
    frequencies. `partial`: as for `read_rope`."""
    share = given.number("partial_rotary_factor", partial or 1.0)
    if share > 1:
        raise given.error(f"{share} of a head cannot be rotated (partial_rotary_factor)")
    return {"partial_rotary_factor": share, "factor": given.number("factor", 1.0)}


@lru_cache(maxsize=64)
def frequencies(rope: Rope, length: int) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair (dim / 2,) fp32, and a factor of the rotated vectors, as computed by
    transformers. `length`: tokens of the text so far; only matters for the types in BY_LENGTH."""
    powers = rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim)
    if rope.type == "default":
        return 1.0 / powers, 1.0
    if rope.type == "longrope":  # some versions of transformers ignore the length
        scaling = dict(rope.scaling)
        divisors = scaling["long_factor" if length > scaling[ORIGINAL] else "short_factor"]
        return 1.0 / (torch.tensor(divisors) * powers), scaling["attention_factor"]
    if rope.type == "proportional":  # which older versions of transformers do not know
        scaling = dict(rope.scaling)
        each = 1.0 / powers
        each[int(scaling["partial_rotary_factor"] * rope.dim // 2) :] = 0  # the other pairs stay as they are
        return each / scaling["factor"], 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": rope.type, "rope_theta": rope.theta, **dict(rope.scaling)}
    config = SimpleNamespace(
        head_dim=rope.dim,
        hidden_size=rope.dim,
        num_attention_heads=1,
        max_position_embeddings=rope.positions,
        rope_theta=rope.theta,
        rope_scaling=parameters,  # its name before transformers 5
        rope_parameters=parameters,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[rope.type](config, torch.device("cpu"), seq_len=length)


def unchanged(rope: Rope) -> float:
    """The length of a text up to which rotations do not depend on it."""
    if rope.type not in BY_LENGTH:
        return math.inf
    return rope.positions if rope.type == "dynamic" else dict(rope.scaling)[ORIGINAL]


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of tokens in their texts; each field is (N,) int64 on the CPU."""

    at: Tensor  # position of each token
    ends: Tensor  # length of its text so far, including the whole prompt; only matters for RoPE of the types BY_LENGTH
    _turns: dict = field(default_factory=dict)

    def turns(self, rope: Rope, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (N, 1, pairs) of all tokens, with the type and device of `like`. Those of a decode step, where
        they take longer than the rotation itself, are kept for the next layers."""
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
        """`frequencies`; one row per token where they depend on the length of its text."""
        if rope.type not in BY_LENGTH:
            return frequencies(rope, rope.positions)
        least = unchanged(rope)
        most = least + 1 if rope.type == "longrope" else None  # LongRoPE has only two sets of frequencies
        lengths, text = self.ends.clamp(least, most).unique(return_inverse=True)
        found, factors = zip(*(frequencies(rope, length) for length in lengths.tolist()))
        return torch.stack(found)[text], factors[0]


def rotation(rope: Rope | None, positions: Positions | None, like: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that rotates queries or keys (N, H, D), with the type and device of `like`, to their positions.
    Without RoPE it returns its argument. Without positions, where `attend` rotates, it only reorders the elements as
    `rotate_to` wants them."""
    if rope is None:
        return lambda x: x
    if positions is None:
        return lambda x: _in_pairs(x, rope.dim)
    cos, sin = positions.turns(rope, like)
    return lambda x: rowwise.rotated(x, cos, sin)


# position rolling: positions are ranks among the cached tokens


def rollable(spec: ModelSpec) -> Rope:
    """The RoPE of a model whose positions can roll. Raises UserError if the model has none, or one that depends on the
    length of the text."""
    if spec.rope is None:
        raise UserError(f"`position_rolling` needs RoPE: {spec.model_type}'s positions are in its embeddings")
    if spec.rope.type in BY_LENGTH:
        reason = f"the RoPE type {spec.rope.type} depends on the length of the text"
        raise UserError(f"`position_rolling`: {reason}, which has no limit")
    return spec.rope


def _in_pairs(x: Tensor, dim: int) -> Tensor:
    """x (N, H, D) with the two elements of each rotated pair side by side: a complex number, which one multiplication
    rotates. The order of elements does not matter for products of queries and keys."""
    return torch.cat([x[..., :dim].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), x[..., dim:]], -1)


def rotate_to(rope: Rope, x: Tensor, positions: Tensor, end: int) -> Tensor:
    """Queries or keys x (B, H, T, D), in pairs, rotated to positions (B, H or 1, T) < `end` on the same device."""
    # powers of two keep the number of tables small; `embedding` takes a tenth of the time of an index
    turns = F.embedding(positions, _table(rope, 1 << (end - 1).bit_length(), x.device))
    turned = x[..., : rope.dim].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    _complex(turned).mul_(_complex(turns))
    turned = turned.to(x.dtype)
    return turned if rope.dim == x.shape[-1] else torch.cat([turned, x[..., rope.dim :]], -1)


def _complex(x: Tensor) -> Tensor:
    """Pairs of elements as complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # an inference tensor could not be used outside that mode
def _table(rope: Rope, count: int, device: torch.device) -> Tensor:
    """(count, dim) fp32: cos and sin of each pair, alternating, at the positions 0 to `count` - 1."""
    each, scale = frequencies(rope, rope.positions)
    angles = torch.arange(count).float()[:, None] * each
    return (torch.stack([torch.cos(angles), torch.sin(angles)], -1).flatten(1) * scale).to(device)
