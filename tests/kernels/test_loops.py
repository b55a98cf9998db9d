"""Compiled loops of attention and of row-wise operations agree with plain formulas."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.compiled import threads
from h2o_flexgen.formats.forms import DIVISORS, cache_format
from h2o_flexgen.kernels import attention, rowwise
from h2o_flexgen.kernels.attention import Softmax
from h2o_flexgen.kernels.cache_loops import free_slots
from h2o_flexgen.kv_cache import make_rule
from h2o_flexgen.kv_cache.fixed_step import Part
from h2o_flexgen.kv_cache.layout import KVTensors
from h2o_flexgen.kv_cache.rule import Rows, Tokens

pytestmark = pytest.mark.skipif(threads.compiled() is None, reason="without numba")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@given(
    B=st.integers(1, 3),
    KV=st.integers(1, 2),
    group=st.integers(1, 3),
    D=st.sampled_from([4, 8, 16, 20, 64, 80]),
    segments=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    kind=st.sampled_from([None, "int8", "int4"]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_attention_reads_no_slot_beyond_cached_len(B, KV, group, D, segments, kind, dtype, data):
    if D % DIVISORS[kind]:
        return
    S = sum(segments)
    cached_len = torch.tensor([data.draw(st.integers(1, S)) for _ in range(B)])
    check_attention((KV, group, D), segments, cached_len, kind, dtype)


def test_threads_share_the_heads():
    cached_len = torch.tensor([700, 1, 350, 699])
    assert 2 * 2 * 80 * int(cached_len.sum()) > threads.SMALL
    check_attention((2, 3, 80), [300, 400], cached_len, None, torch.float32)


def check_attention(heads, segments, cached_len, kind, dtype):
    """Attention over the first `cached_len` slots equals the formula over their decoded vectors, whatever other slots
    hold. `heads`: KV heads, query heads of each, elements of a head."""
    KV, group, D = heads
    B = len(cached_len)
    form = cache_format(kind, dtype, D)
    S = sum(segments)
    k, v = torch.randn(2, B, KV, S, D).to(dtype)
    q = torch.randn(B, KV * group, 1, D).to(dtype)
    stored = form.stored(k, v)
    plain = [each.floats(x, torch.float64) if kind is None else each.floats(x, torch.float32).double()
             for each, x in zip(form, stored)]  # fmt: skip
    unused = torch.arange(S) >= cached_len[:, None]
    for x in stored:  # NaN, also as the scale of codes
        x.view(torch.uint8).transpose(1, 2)[unused] = 255
    parts = [[x.contiguous() for x in t.split(segments, 2)] for t in stored]
    context, _ = attention.cached_attention(q, *parts, cached_len, form=form)
    logits = q.double().view(B, KV, group, D) @ plain[0].transpose(2, 3) / D**0.5
    p = torch.softmax(logits.masked_fill(unused[:, None, None], float("-inf")), -1)
    wanted = (p @ plain[1]).view(B, KV * group, 1, D)
    torch.testing.assert_close(context.double(), wanted, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


@given(sizes=st.lists(st.integers(3, 9), min_size=1, max_size=3), window=st.sampled_from([None, 5]), data=st.data())
def test_the_free_slot_is_the_one_that_a_rule_finds(sizes, window, data):
    """In parts of a cache, with ties, empty slots and protected tokens."""
    B = 2
    rows = Rows.steps(torch.tensor([11, 14]), torch.tensor([6, 8]))
    parts = []
    for S in sizes:
        rule = replace(make_rule("h2o:first=1", S - 2, 1), softmax=Softmax(window=window))
        position = torch.stack([torch.randperm(12)[:S] for _ in range(2 * B)]).view(B, 2, S).to(torch.int32)
        position[torch.rand(position.shape) < data.draw(st.sampled_from([0, 0.1]))] = -1
        score = torch.randint(3, position.shape).float()
        parts.append(Part((), rule, KVTensors([], [], {"score": score, "position": position}, None)))
    heads = tuple((2 * n + 1, 2 * n) for n in range(len(sizes)))
    found = free_slots(heads, [part.candidates(rows) for part in parts], rows.newest, window)
    for part, own in zip(parts, heads):
        tokens = Tokens(part.cache.metadata, rows.newest, rows.prompt_end)
        assert torch.equal(found[:, list(own)], part.rule._free_slot(tokens, may_be_empty=True))


@pytest.mark.parametrize("slot", [-1, 9])
def test_writing_a_slot_that_the_cache_lacks_raises(slot):
    parts = [torch.zeros(1, 1, n, 8) for n in (4, 5)]
    cache = KVTensors(parts, [x.clone() for x in parts], {}, cache_format(None, torch.float32, 8))
    with pytest.raises(IndexError):
        cache.write(torch.tensor([[slot]]), *torch.ones(2, 1, 1, 8))
    assert not any(x.any() for x in (*cache.k, *cache.v))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("pairs", [4, 3, 0])
def test_heads_are_rotated_as_by_torch_bit_by_bit(dtype, pairs, monkeypatch):
    x, cos, sin = (torch.randn(size).to(dtype) for size in ((5, 3, 8), (5, 1, pairs), (5, 1, pairs)))
    by_loops = rowwise.rotated(x, cos, sin)
    monkeypatch.setattr(rowwise, "by_loops", lambda device: False)
    assert torch.equal(by_loops, rowwise.rotated(x, cos, sin))


@pytest.mark.parametrize("in_fp32", [False, True], ids=["weight_of_its_type", "weight_in_fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_agrees_with_torch(dtype, in_fp32, monkeypatch):
    x, weight = torch.randn(300, 1000).to(dtype), torch.randn(1000).to(torch.float32 if in_fp32 else dtype)
    x[3] = 0
    x[5, 7] = float("nan")
    by_loops = rowwise.rms_norm(x, weight, 1e-6)
    monkeypatch.setattr(rowwise, "_by_loops", lambda *tensors: False)
    rounding = dict(atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    torch.testing.assert_close(by_loops, rowwise.rms_norm(x, weight, 1e-6), equal_nan=True, **rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_likeliest_tokens_agree_with_torch(dtype, monkeypatch):
    """Ties go to the first; a row with NaN or infinity has no finite sum."""
    logits = torch.randn(9, 70).to(dtype)
    logits[0, [9, 40]] = 7.0
    logits[1] = 1.0
    logits[2, 5] = float("nan")
    logits[3, 6] = float("inf")
    logits[4, 1:] = float("-inf")
    tokens, sums = rowwise.maxima(logits)
    monkeypatch.setattr(rowwise, "_by_loops", lambda *tensors: False)
    wanted, wanted_sums = rowwise.maxima(logits)
    sound = [n for n in range(9) if n not in (2, 3)]
    assert tokens[sound].tolist() == wanted[sound].tolist() and tokens[:2].tolist() == [9, 0]
    torch.testing.assert_close(sums[sound], wanted_sums[sound])
    assert not sums[[2, 3]].isfinite().any()


def test_functions_in_order_use_a_thread_each(monkeypatch):
    """Threads of torch's own in each of them would keep all others from polling, for good."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "_singles", threads._singles.__wrapped__)  # a pool of its own
    try:
        assert list(threads.in_order([torch.get_num_threads] * 4, 2)) == [1] * 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
