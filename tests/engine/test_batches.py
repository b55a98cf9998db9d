"""How a block is cut into batches and prefill micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.engine.batch import Sequence, make_batches


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    batch_size=st.integers(1, 8),
    prefill_tokens=st.integers(1, 100),
)
def test_every_sequence_is_in_one_batch_and_one_micro_batch(lengths, batch_size, prefill_tokens):
    lengths.sort(reverse=True)
    sequences = [Sequence(n, [1] * length) for n, length in enumerate(lengths)]
    batches = make_batches(sequences, batch_size, prefill_tokens)
    assert [s for b in batches for s in b.sequences] == sequences
    assert all(len(b.sequences) == batch_size for b in batches[:-1])
    for batch in batches:
        assert [row for begin, end in batch.micro for row in range(begin, end)] == list(range(len(batch.sequences)))
        assert batch.longest == max(len(s.prompt) for s in batch.sequences)
        for begin, end in batch.micro:
            ids = batch.prompt_ids(begin, end)
            assert ids.numel() <= prefill_tokens or end - begin == 1
            for row, s in zip(ids.tolist(), batch.sequences[begin:end]):
                assert row[: len(s.prompt)] == s.prompt
