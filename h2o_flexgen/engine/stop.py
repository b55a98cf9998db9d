"""Stop strings: texts that end a sequence as soon as it contains one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from itertools import groupby

#: tokens looked at beyond those that a stop string can span: some decoders strip a blank before the first one
EXTRA_TOKENS = 4
#: what an incomplete character decodes to
PARTIAL = "\ufffd"


def decode(tokenizer, tokens: list[int]) -> str:
    """The text of generated tokens, without special ones."""
    # a clean-up would remove the blanks before brackets and dots in code
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def decode_all(tokenizer, tokens: list[int]) -> str:
    """As `decode`, with the names of special tokens."""
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def decode_with(tokenizer, tokens: list[int], names: frozenset[str]) -> str:
    """As `decode`, with those special tokens whose names are `names`."""
    special = {token: decode_all(tokenizer, [token]) for token in special_ids(tokenizer).intersection(tokens)}
    shown = {token: name for token, name in special.items() if name in names}
    parts = []
    for name, run in groupby(tokens, shown.get):
        run = list(run)
        parts.append(decode(tokenizer, run) if name is None else name * len(run))
    return "".join(parts)


def decode_before(tokenizer, tokens: list[int], text: str, names: frozenset[str]) -> str:
    """As `decode_with`, of `tokens` up to where their text is `text`, which may end inside a token."""
    count = len(tokens)
    while not text.startswith(begun := decode(tokenizer, tokens[:count])):
        count -= 1
    return decode_with(tokenizer, tokens[:count], names) + text[len(begun) :]


def special_ids(tokenizer) -> set[int]:
    """The tokens that no text shows."""
    added = tokenizer.added_tokens_decoder
    return {token for token in added if added[token].special}.union(tokenizer.all_special_ids)


class StopStrings:
    """Finds stop strings in generated texts, decoding only the last tokens at each step. A stop string may name special
    tokens, which no text shows.

    A stop string of n bytes ends in the newest token, or it would have been found before. Every token that shows in
    the text has at least one byte, so the last n of these contain the whole string.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._shows = cache(lambda token: decode(tokenizer, [token]) != "")
        self._naming = cache(lambda stop: tuple(filter(self._names_special, stop)))

    @cached_property
    def _special(self) -> dict[int, str]:
        """The names of the tokens that no text shows."""
        return {token: decode_all(self.tokenizer, [token]) for token in special_ids(self.tokenizer)}

    def _names_special(self, text: str) -> bool:
        return any(name in text for name in self._special.values())

    def text_before(self, tokens: list[int], stop: tuple[str, ...], least: int = 0) -> str | None:
        """The text of `tokens` up to the first stop string, or None if it contains none that ends behind the first
        `least` tokens.

        Must be called after every token: a stop string that ends before the newest one may be missed.
        """
        if least:
            text = decode(self.tokenizer, tokens)
            begin = len(decode(self.tokenizer, tokens[:least]))
            places = [text.find(each, max(0, begin - len(each) + 1)) for each in stop]
            return min((text[:at] for at in places if at >= 0), key=len, default=None)
        found = (self._before_shown(tokens, stop), self._before_special(tokens, self._naming(stop)))
        return min((text for text in found if text is not None), key=len, default=None)

    def _before_shown(self, tokens: list[int], stop: tuple[str, ...]) -> str | None:
        """As `text_before`, for stop strings in the text that shows."""
        tail = self._tail(tokens, most_tokens(stop), decode, self._shows)
        if _first(stop, tail) is None:
            return None
        # the text of a token may depend on those before it
        text = decode(self.tokenizer, tokens)
        at = _first(stop, text)
        return None if at is None else text[:at]

    def _before_special(self, tokens: list[int], stop: tuple[str, ...]) -> str | None:
        """As `text_before`, for stop strings that name special tokens."""
        if not stop or _first(stop, self._tail(tokens, most_tokens(stop), decode_all, lambda token: True)) is None:
            return None
        text = decode_all(self.tokenizer, tokens)
        at = _first(stop, text)
        if at is None:
            return None
        # drop tokens until the text ends at or before the stop string; `startswith`, since half a character decodes
        # differently
        count = len(tokens)
        prefix = text
        while len(prefix) > at or not text.startswith(prefix):
            count -= 1
            prefix = decode_all(self.tokenizer, tokens[:count])
        part = "" if tokens[count] in self._special else text[len(prefix) : at]
        return decode(self.tokenizer, tokens[:count]) + part

    def _tail(self, tokens: list[int], count: int, decode: Callable, shows: Callable[[int], bool]) -> str:
        """The text of the last `count` tokens that show, from the start of a character on."""
        begin = len(tokens)
        shown = 0
        while begin > 0 and shown < count:
            begin -= 1
            shown += shows(tokens[begin])
        tail = decode(self.tokenizer, tokens[begin:])
        while begin > 0 and tail.startswith(PARTIAL):
            begin = max(0, begin - count)
            tail = decode(self.tokenizer, tokens[begin:])
        return tail


def _first(stop: tuple[str, ...], text: str) -> int | None:
    """Where the first stop string begins, or None if the text contains none."""
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)


def most_tokens(stop: tuple[str, ...]) -> int:
    """How many of the last tokens that show must be searched."""
    return max(len(text.encode("utf-8", "surrogatepass")) for text in stop) + EXTRA_TOKENS
