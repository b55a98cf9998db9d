"""A sequence ends at the token that completes a stop string, wherever that begins, as if its whole text were decoded
at every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h2o_flexgen import LLM, Policy, SamplingParams, UserError
from h2o_flexgen.engine.batch import Sequence
from h2o_flexgen.engine.outputs import text_of
from h2o_flexgen.engine.sampling import Sampler
from h2o_flexgen.engine.stop import PARTIAL, StopStrings, decode, decode_before, decode_with, most_tokens
from h2o_flexgen.models.tokenizer import load_tokenizer

pytest_plugins = ["command_tools"]

#: one token of `byte_level`
MERGED = "in"
#: letters of one to four bytes, and characters that decoders treat specially
LETTERS = "ab \n_é€😀"


def by_bytes(token):
    return f"<0x{token:02X}>"


@pytest.fixture(scope="module")
def fallback():
    """A tokenizer like LLaMA's: blanks are ▁, a text loses its first one, and characters without a token are bytes, a
    whole run of which is invalid if one is."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *map(by_bytes, range(256)), "▁", "a", "b", "▁a", "ab", "▁▁", "\n"]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="module")
def byte_level(texts):
    return load_tokenizer(texts)


def outcome(tokenizer, stop, tokens):
    """The slow way: tokens until the first stop string, and the text before it, or None."""
    for n in range(1, len(tokens) + 1):
        text = decode(tokenizer, tokens[:n])
        ends = [text.find(s) for s in stop if s in text]
        if ends:
            return n, text[: min(ends)]
    return len(tokens), None


def found(tokenizer, stop, tokens):
    strings = StopStrings(tokenizer)
    for n in range(1, len(tokens) + 1):
        text = strings.text_before(tokens[:n], tuple(stop))
        if text is not None:
            return n, text
    return len(tokens), None


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


@st.composite
def cases(draw, tokenizer):
    """Tokens, and stop strings, some of which occur in their text: texts in pieces, or any tokens, even unknown."""
    texts = st.text(LETTERS, max_size=12).map(lambda text: encode(tokenizer, text))
    some_bytes = st.binary(max_size=6).map(lambda data: [tokenizer.convert_tokens_to_ids(by_bytes(b)) for b in data])
    any_ids = st.lists(st.integers(0, len(tokenizer) + 3), max_size=5)
    special = st.integers(1, 30).map(lambda count: [2] * count)
    parts = draw(st.lists(st.one_of(texts, texts, some_bytes, any_ids, special), max_size=8))
    tokens = [token for part in parts for token in part if token is not None]
    text = decode(tokenizer, tokens)
    stop = draw(st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=2))
    for _ in range(draw(st.integers(0, 2))):
        begin = draw(st.integers(0, len(text)))
        stop.append(text[begin : begin + draw(st.integers(1, 12))].strip(PARTIAL))
    # one with invalid characters is searched for, but need not be found
    return tokens, [text for text in stop if text and PARTIAL not in text] or ["ab"]


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("kind", ["byte_level", "fallback"])
def test_searching_the_last_tokens_is_as_good_as_searching_the_whole_text(request, kind, data):
    tokenizer = request.getfixturevalue(kind)
    tokens, stop = data.draw(cases(tokenizer))
    assert found(tokenizer, stop, tokens) == outcome(tokenizer, stop, tokens)


def test_only_a_few_tokens_are_decoded(byte_level, monkeypatch):
    tokens = encode(byte_level, "the same again and " * 200)
    stops = StopStrings(byte_level)
    sizes = []
    monkeypatch.setattr("h2o_flexgen.engine.stop.decode", lambda t, ids: sizes.append(len(ids)) or decode(t, ids))
    assert stops.text_before(tokens, ("zebra",)) is None
    assert max(sizes) <= 2 * (len("zebra") + 4)


@pytest.mark.parametrize(
    "text, stop, before",
    [
        ("one two</s> three", ["</s>"], "one two"),
        ("one</s>two<s>three", ["<s>"], "onetwo"),  # the other special token before it is left out, as usual
        ("one </s>\ntwo", ["</s>\n"], "one "),
        ("one </s> two", ["ne </s>"], "o"),
        ("</s>", ["</s>"], ""),
        ("é😀</s>", ["😀</s>"], "é"),
        ("one</s>two", ["onetwo"], ""),  # in the text that shows
        ("one</s>two", ["s>", "</", "s"], None),  # part of a name does not count
        ("one two", ["</s>"], None),
    ],
)
def test_a_stop_string_names_special_tokens(byte_level, text, stop, before):
    assert found(byte_level, stop, encode(byte_level, text))[1] == before


@pytest.mark.parametrize("stop", [[f"</s>{MERGED}", MERGED[-1]], [MERGED[-1], f"</s>{MERGED}"]])
def test_the_earlier_of_two_stop_strings_wins_if_one_names_a_special_token(byte_level, stop):
    """One token completes both."""
    assert len(encode(byte_level, MERGED)) == 1
    assert found(byte_level, stop, encode(byte_level, f"x</s>{MERGED}"))[1] == "x"


def test_a_text_of_pieces_ends_before_a_special_token(fallback):
    tokens = [*encode(fallback, " a b"), fallback.convert_tokens_to_ids("</s>")]
    assert found(fallback, ["</s>"], tokens) == (len(tokens), decode(fallback, tokens))
    assert found(fallback, ["b</s>"], tokens) == (len(tokens), decode(fallback, tokens)[:-1])


# as the engine uses it


def take(sampler, params, tokens):
    """A sequence to which the sampler appends these tokens until it ends."""
    s = Sequence(0, [5, 6], params)
    for token in tokens:
        logits = torch.zeros(1, 300)
        logits[0, token] = 9.0
        sampler.take([s], logits)
    return s


@pytest.mark.parametrize("extra, reason", [(dict(), "stop"), (dict(max_tokens=2), "length")])
def test_a_stop_string_ends_a_sequence_with_all_its_tokens(byte_level, extra, reason):
    tokens = encode(byte_level, "xyz#and more")
    params = SamplingParams(**{"max_tokens": 20, **extra}, stop="z#")
    s = take(Sampler(frozenset(), byte_level), params, tokens)
    assert s.finish_reason == reason
    count = found(byte_level, ["z#"], tokens)[0] if reason == "stop" else 2
    assert s.tokens == tokens[:count] and len(s.logprobs) == count
    assert s.text == ("xy" if reason == "stop" else None)


def test_a_stop_string_in_the_last_token_counts(byte_level):
    tokens = encode(byte_level, "xyz")
    s = take(Sampler(frozenset(), byte_level), SamplingParams(max_tokens=len(tokens), stop=["z"]), tokens)
    assert (s.finish_reason, s.text) == ("stop", "xy")


@pytest.mark.parametrize(
    "text, stop, before",
    [
        ("xyz</s>", "z</s>", "xy"),  # begins before the token that ends the text
        ("xyz</s>", "</s>", "xyz"),
        ("xyz", "yz", "x"),
        ("xyz", "z", "xy"),
        ("xyz", "a", "xy"),
    ],
)
@pytest.mark.parametrize("by_id", [False, True])
def test_a_stop_string_that_an_end_token_completes_counts(byte_level, text, stop, before, by_id):
    tokens = encode(byte_level, text)
    params = SamplingParams(max_tokens=20, stop=stop, stop_token_ids=tokens[-1:] if by_id else ())
    s = take(Sampler(frozenset() if by_id else frozenset(tokens[-1:]), byte_level), params, tokens)
    assert s.finish_reason == "stop" and s.tokens == tokens
    assert text_of(s, byte_level) == before


def test_the_text_of_an_end_token_is_left_out_though_a_stop_string_begins_in_it(byte_level):
    (token,) = encode(byte_level, MERGED)
    tokens = [*encode(byte_level, "x"), token]
    s = take(Sampler(frozenset({token}), byte_level), SamplingParams(max_tokens=20, stop=MERGED[-1]), tokens)
    assert text_of(s, byte_level) == "x"


def test_stop_strings_end_texts_of_a_job_and_leave_the_others(texts):
    """The prompt is not searched, and every text is the part of the whole one before the stop string."""
    prompts = ["def f(x):", "import json", "class A", "for n in range(9):"]
    options = dict(device="cpu", dtype="float32", progress=False)
    with LLM(str(texts), Policy(2, 2), **options) as llm:
        whole = [o.outputs[0] for o in llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))]
        stop = [whole[0].text[5:8], whole[1].text[2:4], "def", "json"]
        params = SamplingParams(max_tokens=12, ignore_eos=True, stop=stop)
        outputs = [o.outputs[0] for o in llm.generate(prompts, params)]
    for output, full in zip(outputs, whole):
        count, before = outcome(llm.tokenizer, stop, full.token_ids)
        assert output.token_ids == full.token_ids[:count]
        assert output.logprobs == pytest.approx(full.logprobs[:count], abs=1e-4)
        assert output.text == (full.text if before is None else before)
        assert output.finish_reason == ("length" if before is None else "stop")
    assert {o.finish_reason for o in outputs[:2]} == {"stop"}


def test_every_sequence_has_stop_strings_and_an_end_of_its_own(byte_level):
    """For sequences that get the same tokens, the last of which ends texts."""
    tokens = [*encode(byte_level, "one two three"), 2]
    ways = [dict(), dict(stop="two"), dict(stop=["w", "three"]), dict(max_tokens=3), dict(ignore_eos=True)]
    sequences = [Sequence(n, [5], SamplingParams(**{"max_tokens": 90, **way})) for n, way in enumerate(ways)]
    sampler = Sampler(frozenset({2}), byte_level)
    for token in tokens:
        logits = torch.zeros(len(sequences), 300)
        logits[:, token] = 9.0
        sampler.take(sequences, logits)
    assert [s.finish_reason for s in sequences] == ["stop", "stop", "stop", "length", None]
    assert [s.text for s in sequences] == [None, "one ", "one t", None, None]
    for s, stop in zip(sequences[1:3], [["two"], ["w", "three"]]):
        assert s.tokens == tokens[: found(byte_level, stop, tokens)[0]]
    assert [len(s.tokens) for s in sequences[3:]] == [3, len(tokens)] and sequences[0].tokens == tokens


def test_stop_strings_need_a_tokenizer(model):
    with LLM(str(model), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        params = [SamplingParams(), SamplingParams(stop=["a"])]
        with pytest.raises(UserError, match="prompt 1: `stop` needs a tokenizer"):
            llm.generate([[5, 6], [5, 6]], params)
        good, bad = llm.generate([[5, 6], [5, 6]], params, skip_errors=True)
    assert good.outputs and "`stop` needs a tokenizer" in bad.error


@pytest.mark.parametrize("stop", ["", ["a", ""], [5], 5, b"a", {"a"}, [["a"]], [None]], ids=repr)
def test_an_invalid_stop_string_is_refused(stop):
    with pytest.raises(UserError, match="stop"):
        SamplingParams(stop=stop)


def test_stop_strings_are_kept_as_a_tuple():
    assert SamplingParams(stop="a b").stop == ("a b",)
    assert SamplingParams(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))
    assert SamplingParams(stop=None).stop == SamplingParams().stop == ()
    assert most_tokens(("\ud800",))  # half a surrogate pair never matches


@pytest.mark.parametrize(
    "text, names, shown",
    [
        ("a</s>b", {"<s>"}, "ab"),
        ("a<s>b</s>", {"<s>"}, "a<s>b"),
        ("<s><s>é</s>😀<s>", {"<s>", "</s>"}, "<s><s>é</s>😀<s>"),
        ("", {"<s>"}, ""),
    ],
)
def test_some_special_tokens_can_be_shown(byte_level, text, names, shown):
    ids = byte_level(text, add_special_tokens=False)["input_ids"]
    assert decode_with(byte_level, ids, frozenset(names)) == shown
    assert decode_with(byte_level, ids, frozenset()) == decode(byte_level, ids)


@pytest.mark.parametrize("stop, before", [("in", "a<s>po"), ("t", "a<s>poin"), ("oint</s>", "a<s>p"), ("a", "")])
def test_special_tokens_before_a_stop_string(byte_level, stop, before):
    ids = byte_level("a<s>point</s>more", add_special_tokens=False)["input_ids"]
    for count in range(1, len(ids) + 1):
        text = StopStrings(byte_level).text_before(ids[:count], (stop,))
        if text is not None:
            break
    assert decode_before(byte_level, ids[:count], text, frozenset({"<s>"})) == before
