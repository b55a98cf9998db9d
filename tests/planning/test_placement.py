"""Whole tensors and KV blocks are spread so that bytes match the fractions and every layer costs the same I/O."""

from __future__ import annotations

from collections import Counter
from math import prod

from hypothesis import example, given
from hypothesis import strategies as st

from h2o_flexgen.models.opt import tensors
from h2o_flexgen.models.registry import spec_of
from h2o_flexgen.planning.placement import Diffusion, Placement, place_weights, spread
from h2o_flexgen.policy import TIERS, Policy


@st.composite
def fractions(draw):
    gpu = draw(st.integers(0, 100))
    cpu = draw(st.integers(0, 100 - gpu))
    return Policy(percent=(gpu, cpu, 100, 0, 100, 0)).fractions("weights")


def bytes_by_tier(layers, tiers):
    found = Counter()
    for name, size in {name: size for layer in layers for name, size in layer.items()}.items():
        found[tiers[name]] += size
    return [found[tier] for tier in TIERS]


def decoder(n, sizes):
    return {f"{n}.{x}": size for x, size in enumerate(sizes)}


def opt_shaped(num_layers, width, ends):
    sizes = [width] * 4 + [4 * width] * 2  # q, k, v, out, fc1, fc2
    return [{"words": ends, "positions": width}, *(decoder(n, sizes) for n in range(num_layers)), {"words": ends}]


@given(n=st.integers(1, 60), fractions=fractions())
def test_every_prefix_of_equal_sizes_is_within_one_of_its_share(n, fractions):
    tiers = spread(n, fractions)
    for end in range(1, n + 1):
        count = Counter(tiers[:end])
        for tier, fraction in zip(TIERS, fractions):
            assert abs(count[tier] - fraction * end) <= 1 + 1e-6


@given(num_layers=st.integers(1, 40), width=st.integers(1, 50), ends=st.integers(1, 2000), fractions=fractions())
def test_weights_are_within_a_tensor_of_their_fractions(num_layers, width, ends, fractions):
    """A tensor of a layer, or the embedding, which is one tensor."""
    layers = opt_shaped(num_layers, width, ends)
    tiers = place_weights(layers, fractions)
    assert set(tiers) == {name for layer in layers for name in layer}
    total = sum({name: size for layer in layers for name, size in layer.items()}.values())
    largest = max(4 * width, ends)
    for got, fraction in zip(bytes_by_tier(layers, tiers), fractions):
        assert abs(got - fraction * total) <= largest + 1e-6 * total


@given(num_layers=st.integers(1, 40), width=st.integers(1, 50), ends=st.integers(1, 2000), fractions=fractions())
@example(num_layers=3, width=10, ends=100, fractions=(0.0, 1.0, 0.0))
def test_a_tier_of_zero_percent_gets_nothing(num_layers, width, ends, fractions):
    tiers = {*place_weights(opt_shaped(num_layers, width, ends), fractions).values(), *spread(num_layers, fractions)}
    for tier, fraction in zip(TIERS, fractions):
        assert fraction > 0 or tier not in tiers


def test_the_head_goes_to_the_fastest_tier_that_holds_it_whole():
    layers = opt_shaped(10, 10, 100)  # 1310 bytes; a tenth holds the head, and a layer has 120
    assert place_weights(layers, (0.1, 0.0, 0.9))["words"] == "gpu"
    assert place_weights(layers, (0.05, 0.15, 0.8))["words"] == "cpu"
    assert place_weights(layers, (0.05, 0.05, 0.9))["words"] == "disk"
    untied = [{"words": 100}, *layers[1:-1], {"head": 100}]
    tiers = place_weights(untied, (0.1, 0.0, 0.9))
    assert (tiers["head"], tiers["words"]) == ("gpu", "disk")


@given(num_layers=st.integers(2, 48), fractions=fractions())
def test_every_layer_costs_about_the_same_io(num_layers, fractions):
    """Bytes on a tier differ between layers by at most one largest matrix."""
    width = 3
    layers = opt_shaped(num_layers, width, 0)
    tiers = place_weights(layers, fractions)
    costs = [bytes_by_tier([layer], tiers) for layer in layers[1:-1]]
    for each in zip(*costs):
        assert max(each) - min(each) <= 4 * width


@given(num_layers=st.integers(1, 30), width=st.integers(1, 50), ends=st.integers(1, 2000), fractions=fractions())
def test_placement_is_deterministic_and_independent_of_the_unit(num_layers, width, ends, fractions):
    layers = opt_shaped(num_layers, width, ends)
    tiers = place_weights(layers, fractions)
    assert place_weights([dict(layer) for layer in layers], fractions) == tiers
    scaled = opt_shaped(num_layers, 1024 * width, 1024 * ends)
    assert place_weights(scaled, fractions) == tiers


@given(sizes=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=9), max_size=20), fractions=fractions())
def test_diffusion_never_drifts(sizes, fractions):
    diffusion = Diffusion(fractions)
    largest = max((s for layer in sizes for s in layer), default=0)
    for layer in sizes:
        tiers = diffusion.place(layer)
        assert len(tiers) == len(layer) and set(tiers) <= set(TIERS)
        total = sum(diffusion.placed)
        for placed, fraction in zip(diffusion.placed, fractions):
            assert abs(placed - fraction * total) <= largest + 1e-6 * total


@given(
    weights=fractions(),
    cache=fractions(),
    activations=fractions(),
    batches=st.integers(1, 6),
    layers=st.integers(1, 6),
    projected=st.booleans(),
    tied=st.booleans(),
)
def test_everything_has_a_tier(weights, cache, activations, batches, layers, projected, tied):
    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=layers, ffn_dim=32, num_attention_heads=2)
    sizes |= dict(max_position_embeddings=32, word_embed_proj_dim=8 if projected else 16, tie_word_embeddings=tied)
    shapes = [layer.shapes for layer in tensors(spec_of({"model_type": "opt", **sizes}))]
    percent = tuple(round(100 * f) for part in (weights, cache, activations) for f in part[:2])
    all_shapes = {name: shape for layer in shapes for name, shape in layer.items()}
    placement = Placement.of(Policy(percent=percent), shapes, batches, lambda name: prod(all_shapes[name]))
    assert set(placement.weights) == {name for layer in shapes for name in layer}
    assert set(placement.cache) == {(layer, k) for layer in range(layers) for k in range(batches)}
    assert len(placement.activations) == batches
    vectors = {name for layer in shapes for name, shape in layer.items() if len(shape) == 1}
    assert all(placement.weights[name] == "gpu" for name in vectors)
    tiers = {*placement.weights.values(), *placement.cache.values(), *placement.activations}
    assert tiers <= set(TIERS)
