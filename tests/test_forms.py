"""The forms in which a model's tensors may be kept, and what the store makes of them."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.formats import GGUF, Dense, Int8
from h2o_flexgen.formats.forms import Form, forms
from h2o_flexgen.models.quantised.method import zeroed

FP32 = Dense(torch.float32)
FP16 = Dense(torch.float16)
Q4 = GGUF["Q4_0"]
Q8 = GGUF["Q8_0"]
#: a small checkpoint: its embedding is also its head
STORED = {"words": Q8, "norm": FP16, "up": Q4, "down": Q8}
TIED = dict(gathered=["words"], head=["words", "norm"])


def found(operands=None, formats=STORED, decodes=True, **parts) -> list[dict[str, Form]]:
    return forms(formats, torch.float32, operands, decodes=decodes, **(parts or TIED))


def test_as_stored_quantised_matrices_become_operands_when_they_are_used():
    (exact,) = found(decodes=False)
    assert exact == {
        "words": Form(Q8, Q8, FP32, is_sliced=True),
        "norm": Form(FP16, FP32, FP32),
        "up": Form(Q4, Q4, FP32),
        "down": Form(Q8, Q8, FP32),
    }
    (in_int8,) = found({"Q4_0": "Q4_0", "Q8_0": "int8"}, decodes=False)
    assert in_int8 == {
        "words": Form(Q8, Q8, Int8(), is_sliced=True),
        "norm": Form(FP16, FP32, FP32),
        "up": Form(Q4, Q4, Q4),
        "down": Form(Q8, Q8, Int8()),
    }
    assert [form.given for form in in_int8.values()] == [Q8, FP32, Q4, Int8()]
    assert [form.is_direct for form in in_int8.values()] == [False, True, True, False]
    assert [form.in_int8 for form in in_int8.values()] == [True, False, True, True]


def test_blocks_of_one_name_may_be_too_small_to_be_multiplied_as_stored():
    """One group for all inputs is cut into blocks that divide them, whatever these are."""
    large, small = zeroed("gptq", 64), zeroed("gptq", 8)
    (only,) = found({"gptq": "gptq"}, {"up": large, "down": small}, decodes=False)
    assert [form.operand for form in only.values()] == [large, Int8()]


def test_exact_matmuls_read_what_was_decoded_at_loading():
    decoded, as_stored = found()
    assert [as_stored] == found(decodes=False)
    assert decoded == {name: Form(stored, FP32, FP32) for name, stored in STORED.items()}


def test_a_tied_head_is_unpacked_into_a_copy_or_not_at_all():
    """Since the rows of the embedding are read as floats."""
    copied, kept, as_stored = found({"Q4_0": "Q4_0", "Q8_0": "int8"})
    unpacked = Form(Q8, Int8(), Int8())
    assert kept == as_stored | {"down": unpacked}
    assert copied == kept | {"words (copy)": unpacked}


@pytest.mark.parametrize(
    "formats, operands",
    [
        ({"words": FP16, "up": FP32}, None),
        ({"words": Q4, "up": Q4, "norm": FP16}, {"Q4_0": "Q4_0"}),
        ({"words": Int8(), "up": Int8()}, {"int8": "int8"}),
    ],
    ids=["floats", "blocks", "int8"],
)
def test_where_nothing_would_be_decoded_there_is_one_way(formats, operands):
    (only,) = found(operands, formats)
    assert all(form.is_direct for form in only.values())


def test_a_head_of_its_own_is_decoded_like_any_other_matrix():
    decoded, _ = found({"Q4_0": "int8"}, {"words": Q4, "head": Q4}, gathered=["words"], head=["head"])
    assert decoded == {"words": Form(Q4, Q4, Int8()), "head": Form(Q4, Int8(), Int8())}
