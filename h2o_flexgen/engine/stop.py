"""Stop strings: texts that end a sequence as soon as it contains one of them."""

from __future__ import annotations

from functools import cache

#: tokens looked at beyond those that a stop string can span: some decoders strip a blank before the first one
EXTRA_TOKENS = 4
#: what the bytes of a character decode to while some of them are missing
PARTIAL = "\ufffd"


def decode(tokenizer, tokens: list[int]) -> str:
    """The text of generated tokens, without special ones."""
    # a clean-up would take away the blanks that code has before brackets and dots
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopStrings:
    """Finds stop strings in generated texts, decoding only the last tokens at each step.

    A stop string of n bytes ends in the newest token, or it would have been found before. Every token that shows in
    the text has a byte or more, so the last n of these hold it all.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._shows = cache(lambda token: decode(tokenizer, [token]) != "")

    def text_before(self, tokens: list[int], stop: tuple[str, ...]) -> str | None:
        """The text of `tokens` up to the first stop string, or None if it contains none.

        To be asked after every token: a stop string that ends before the newest token need not be found.
        """
        tail = self._tail(tokens, most_tokens(stop))
        if not any(text in tail for text in stop):
            return None
        # what tokens decode to may depend on those before them
        whole = decode(self.tokenizer, tokens)
        return min((whole[: whole.find(text)] for text in stop if text in whole), key=len, default=None)

    def _tail(self, tokens: list[int], count: int) -> str:
        """The text of the last `count` tokens that show, from the beginning of a character on."""
        begin, shown = len(tokens), 0
        while begin > 0 and shown < count:
            begin -= 1
            shown += self._shows(tokens[begin])
        tail = decode(self.tokenizer, tokens[begin:])
        while begin > 0 and tail.startswith(PARTIAL):
            begin = max(0, begin - count)
            tail = decode(self.tokenizer, tokens[begin:])
        return tail


def most_tokens(stop: tuple[str, ...]) -> int:
    """How many of the last tokens that show are looked at."""
    return max(len(text.encode("utf-8", "surrogatepass")) for text in stop) + EXTRA_TOKENS
