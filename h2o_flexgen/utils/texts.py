"""English prose that comes with Python, and passages of texts."""

from __future__ import annotations

from h2o_flexgen.errors import UserError

#: the name of the built-in text
BUILTIN = "Python's language reference"


def builtin_text() -> str:
    """Python's language reference, by topic. Raises UserError if this Python lacks it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("this Python comes without the text of the built-in prompts: give an `input_file`") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def evenly(ids: list[int], count: int, length: int) -> list[list[int]]:
    """`count` passages of `length` tokens each, evenly spaced from the first token to the last."""
    begins = [n * (len(ids) - length) // max(1, count - 1) for n in range(count)]
    return [ids[begin : begin + length] for begin in begins]
