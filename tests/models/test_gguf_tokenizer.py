"""Tokenizers of GGUF files: their metadata, and llama.cpp's defaults for what is missing. The expected tokens and words
are llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import zoo
from gguf_tools import write_gguf
from tokenizers import Regex, pre_tokenizers

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.errors import UserError
from h2o_flexgen.models.gguf_tokenizer import write_tokenizer
from h2o_flexgen.models.pre_tokenizers import PRE_TOKENIZERS
from h2o_flexgen.models.tokenizer import end_ids, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())

#: byte-level byte pairs, like LLaMA 3's: control tokens, the bytes, and the results of merges
BYTE_PAIRS = {
    "model": "gpt2",
    "pre": "llama-bpe",
    "tokens": ["<|begin|>", "<|end_of_text|>", "<tool>", *LETTERS, "he", "Ġw", "hel", "lo", "hello"],
    "token_type": [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * 261],
    "merges": ["h e", "Ġ w", "he l", "l o"],
    "bos_token_id": 0,
    "eos_token_id": 1,
}
WORDS = ["▁", "h", "e", "l", "o", "w", "▁w", "he", "▁he", "ll", "llo", "▁hello", "ello", "▁ho"]
#: SentencePiece's byte pairs, like LLaMA 2's, without the ids of special tokens
PIECES = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "<tool>", *WORDS],
    "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * len(WORDS)],
    "scores": [0.0] * 260 + [-float(n) for n in range(len(WORDS))],
}
#: pieces in an order of their own, like Gemma 4's
MERGED = {
    "model": "gemma4",
    "tokens": ["<pad>", "<eos>", "<bos>", "<unk>", *PIECES["tokens"][3:], "\n", "\n\n"],
    "token_type": [CONTROL, CONTROL, CONTROL, UNKNOWN, *PIECES["token_type"][3:], NORMAL, NORMAL],
    "merges": ["h e", "l l", "▁ he", "ll o", "▁he llo", "▁ w", "\n \n"],
    "bos_token_id": 2,
    "eos_token_id": 1,
    "unknown_token_id": 3,
}


def unpack(folder: Path, metadata: dict, vocab: int = 1000):
    """The tokenizer that is written from metadata; None removes a value."""
    fields = {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}
    fields["tokenizer.chat_template"] = fields.pop("tokenizer.ggml.chat_template", None)
    field = lambda name, default=None: fields.get(name, default)
    file = SimpleNamespace(field=field, path=Path("model.gguf"), config={"vocab_size": vocab})
    write_tokenizer(file, folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return load_tokenizer(folder)


def tokens_of(tokenizer, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)


def ends_of(folder: Path, tokenizer) -> set[str]:
    ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return set(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize(
    "kind, changes, around",
    [
        (BYTE_PAIRS, {}, ["<|begin|>"]),
        (BYTE_PAIRS, {"add_bos_token": False}, []),
        (BYTE_PAIRS, {"pre": "tekken"}, ["<|begin|>"]),
        (BYTE_PAIRS, {"pre": "qwen2"}, []),
        (BYTE_PAIRS, {"pre": "qwen2", "add_bos_token": True}, ["<|begin|>"]),
        (BYTE_PAIRS, {"pre": "smaug-bpe"}, []),  # splits as LLaMA 3 does
        (BYTE_PAIRS, {"pre": None}, []),
        (BYTE_PAIRS, {"bos_token_id": None}, []),  # names none, and does not ask for one itself
        (BYTE_PAIRS, {"bos_token_id": 3, "pre": "qwen2"}, []),  # an ordinary token, not used
        (BYTE_PAIRS, {"add_eos_token": True}, ["<|begin|>", "<|end_of_text|>"]),
        (PIECES, {}, ["<s>"]),
        (PIECES, {"add_bos_token": False}, []),
        (PIECES, {"add_eos_token": True}, ["<s>", "</s>"]),
        (PIECES, {"bos_token_id": 2}, ["</s>"]),
        (PIECES, {"bos_token_id": 5000}, ["<s>"]),  # outside the vocabulary: the default
    ],
)
def test_bos_and_eos_around_a_text(tmp_path, kind, changes, around):
    tokenizer = unpack(tmp_path, kind | changes)
    plain = tokenizer.convert_ids_to_tokens(tokenizer("hello", add_special_tokens=False).input_ids)
    assert tokens_of(tokenizer, "hello") == [*around[:1], *plain, *around[1:]]


@pytest.mark.parametrize("pre, tokens", [("llama-bpe", ["hello"]), ("smaug-bpe", ["hel", "lo"])])
def test_some_pre_tokenizers_keep_a_known_word_whole(tmp_path, pre, tokens):
    tokenizer = unpack(tmp_path, BYTE_PAIRS | {"pre": pre, "add_bos_token": False})
    assert tokens_of(tokenizer, "hello w") == [*tokens, "Ġw"]


@pytest.mark.parametrize(
    "text, changes, tokens",
    [
        ("hello w", {}, ["▁hello", "▁w"]),
        (" hello", {}, ["▁", "▁hello"]),
        ("hello</s>hello<tool>w", {}, ["▁hello", "</s>", "▁hello", "<tool>", "▁w"]),  # each part has a blank
        ("hello w", {"add_space_prefix": False}, ["he", "llo", "▁w"]),
        ("é", {}, ["▁", "<0xC3>", "<0xA9>"]),
        ("h\n", {}, ["▁", "h", "<0x0A>"]),
    ],
)
def test_pieces(tmp_path, text, changes, tokens):
    tokenizer = unpack(tmp_path, PIECES | {"add_bos_token": False} | changes)
    assert tokens_of(tokenizer, text) == tokens
    shown = text.replace("</s>", "").replace("o<tool>w", "o<tool> w").replace("hellohello", "hello hello")
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == shown


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("hello hello", ["he", "llo", "▁hello"]),
        (" w", ["▁w"]),
        ("w\n\n\nw", ["w", "\n\n", "\n", "w"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("<tool> w", ["<tool>", "▁w"]),
    ],
)
@pytest.mark.parametrize("asked", [None, True, False])
def test_pieces_that_are_merged_in_an_order_of_their_own(tmp_path, text, tokens, asked):
    """A text begins with <bos>, whatever a file says."""
    tokenizer = unpack(tmp_path, MERGED | {"add_bos_token": asked})
    assert tokens_of(tokenizer, text) == ["<bos>", *tokens]
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert ends_of(tmp_path, tokenizer) == {"<eos>"}


def test_impossible_merges_are_ignored(tmp_path):
    tokenizer = unpack(tmp_path, BYTE_PAIRS | {"merges": ["he", "zz q", "", *BYTE_PAIRS["merges"]]})
    assert tokens_of(tokenizer, "hel w") == ["<|begin|>", "hel", "Ġw"]


def test_special_tokens_are_left_out_of_texts_but_user_defined_ones_are_not(tmp_path):
    tokenizer = unpack(tmp_path, BYTE_PAIRS)
    ids = tokenizer("<|end_of_text|>he<tool>é").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|begin|>", "<|end_of_text|>", "he", "<tool>", "Ã", "©"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<tool>é"


@pytest.mark.parametrize(
    "named, changes, ends",
    [
        (["<|eot_id|>", "<|im_end|>"], {}, {"<|end_of_text|>", "<|eot_id|>", "<|im_end|>"}),
        (["[x]"], {"eot_token_id": 264, "eom_token_id": 2}, {"<|end_of_text|>", "[x]", "<tool>"}),
        (["<|end|>", "<|return|>"], {}, {"<|end_of_text|>", "<|end|>", "<|return|>"}),
        (["<|end|>", "<|return|>", "<|call|>"], {}, {"<|end_of_text|>", "<|return|>", "<|call|>"}),  # ends a part only
        (["<|end|>", "<|calls|>", "<|flush|>"], {}, {"<|end_of_text|>", "<|calls|>", "<|flush|>"}),
        (["<|im_end|>"], {"token_type": [*BYTE_PAIRS["token_type"], NORMAL]}, {"<|end_of_text|>", "<|im_end|>"}),
        (["<end_of_turn>"], {"token_type": None}, {"<|end_of_text|>", "<end_of_turn>"}),
        (["</s>"], {"token_type": [*BYTE_PAIRS["token_type"], NORMAL]}, {"<|end_of_text|>"}),  # HTML's
        (["<|im_end|>"], {"token_type": [*BYTE_PAIRS["token_type"], USER_DEFINED]}, {"<|end_of_text|>", "<|im_end|>"}),
        (["[x]"], {"eos_token_id": 264}, {"<|end_of_text|>", "[x]"}),
        (["[x]"], {"eos_token_id": 9999}, {"<|end_of_text|>"}),
    ],
)
def test_what_ends_a_text(tmp_path, named, changes, ends):
    kinds = [*BYTE_PAIRS["token_type"], *[CONTROL] * len(named)]
    tokens = [*BYTE_PAIRS["tokens"], *named]
    tokenizer = unpack(tmp_path, BYTE_PAIRS | {"tokens": tokens, "token_type": kinds} | changes)
    assert ends_of(tmp_path, tokenizer) == ends
    for name in ends:
        assert tokens_of(tokenizer, f"he{name}he")[-3:] == ["he", name, "he"]
    ids = tokenizer.convert_tokens_to_ids([name for name in named if name in ends and name != "[x]"])
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""


def test_the_chat_template_and_the_special_tokens(tmp_path):
    tokenizer = unpack(tmp_path, PIECES | {"chat_template": "{{ bos_token }}{{ messages[0].content }}</s>"})
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w"}], tokenize=False) == "<s>w</s>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert end_ids(tokenizer) == {2}


TEXT = "It's WE'LL x1234 a--b.\n\n\nHtmlDoc  日本。e\u0301x $"
#: its words, for each pre-tokenizer
SPLITS = {
    "default": "It·'·s· WE·'·LL· x·123·4· a·--·b·.·\n\n·\n·HtmlDoc· · 日本·。·e·́·x· ·$",
    "llama3": "It·'s· WE·'LL· x·123·4· a·--·b·.\n\n\n·HtmlDoc· · 日本·。e·́x· $",
    "qwen2": "It·'s· WE·'LL· x·1·2·3·4· a·--·b·.\n\n\n·HtmlDoc· · 日本·。e·́x· $",
    "qwen35": "It·'s· WE·'LL· x·1·2·3·4· a·--·b·.\n\n\n·HtmlDoc· · 日本·。e\u0301x· $",
    "gpt-2": "It·'s· WE·'·LL· x·1234· a·--·b·.·\n\n·\n·HtmlDoc· · 日本·。·e·́·x· $",
    "smollm": "It·'s· WE·'·LL· x·1·2·3·4· a·--·b·.·\n\n·\n·HtmlDoc· · 日本·。·e·́·x· $",
    "falcon": "It·'·s· WE·'·LL· x·123·4· a·--·b·.·\n\n·\n·HtmlDoc· · 日本·。·e·́·x· ·$",
    "tekken": "It·'s· WE·'LL· x·1·2·3·4· a·--·b·.\n\n\n·Html·Doc· · 日本·。e\u0301x· $",
    "gpt-4o": "It's· WE'LL· x·123·4· a·--·b·.\n\n\n·Html·Doc· · 日本·。e\u0301x· $",
    "deepseek-llm": "It·'·s· WE·'·LL· x·1234· a·--·b·.·\n·\n·\n·HtmlDoc·  ·日本·。·e·́·x· $",
    "deepseek-coder": "It·'·s· WE·'·LL· x·1·2·3·4· a·--·b·.·\n·\n·\n·HtmlDoc· · ·日本·。·e·́·x· $",
    "deepseek-v3": "It·'s· WE·'LL· x·123·4· a·--·b·.\n\n\n·HtmlDoc·  ·日本·。·e\u0301x· $",
    "bailingmoe": "It·'s· WE·'LL· x·1·2·3·4· a·--·b·.\n\n\n·HtmlDoc· · 日本·。e·́x· $",
    "seed-coder": "It·'s· WE·'LL· x·1·2·3·4· a·--·b·.·\n\n\n·HtmlDoc· · 日本·。e·́x· $",
    "minicpm5": "It·'s· WE·'LL· x·123·4· a·--·b·.\n\n\n·HtmlDoc· · 日本·。e·́x· $",
    "ufakzeka": "It·'s· WE·'LL· x·1·2·3·4· a·--·b·.\n\n\n·HtmlDoc· · 日本·。e·́x· $",
    "viking": "It's· WE'LL· x·1·2·3·4· a--b·.\n\n\n·HtmlDoc· · 日本·。·e\u0301x· $",
    "poro-chat": "It's· WE'LL· x1234· a--b·.\n\n\n·HtmlDoc· · 日本·。·e\u0301x· $",
}


@pytest.mark.parametrize("name", SPLITS)
def test_how_a_text_is_split(name):
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    words = pre_tokenizers.Sequence(steps).pre_tokenize_str(TEXT)
    assert [word for word, _ in words] == SPLITS[name].split("·")


def test_every_pre_tokenizer_is_tested():
    tested = {PRE_TOKENIZERS[name].patterns for name in SPLITS}
    assert {how.patterns for how in PRE_TOKENIZERS.values()} == tested


@pytest.mark.parametrize(
    "metadata, message",
    [
        (BYTE_PAIRS | {"model": "t5"}, "no support for GGUF tokenizers of the kind 't5'; known: llama, gemma4, gpt2"),
        (BYTE_PAIRS | {"model": 7}, "of the kind 7"),
        (BYTE_PAIRS | {"pre": "new-bpe"}, "its pre-tokenizer 'new-bpe' is unknown"),
        (BYTE_PAIRS | {"pre": ["qwen2"]}, "its pre-tokenizer "),
        (BYTE_PAIRS | {"tokens": None}, "tokenizer.ggml.tokens must be a list of texts"),
        (BYTE_PAIRS | {"tokens": "abc"}, "tokenizer.ggml.tokens must be a list of texts"),
        (BYTE_PAIRS | {"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of texts"),
        (BYTE_PAIRS | {"tokens": ["a", "a"]}, "contains a token twice"),
        (BYTE_PAIRS | {"token_type": [1]}, "token_type has 1 entries for 264 tokens"),
        (BYTE_PAIRS | {"merges": None}, "tokenizer.ggml.merges must be a list"),
        (BYTE_PAIRS | {"merges": ["x y"]}, "its merge 'x y' makes a token that its vocabulary lacks"),
        (BYTE_PAIRS | {"bos_token_id": None, "add_bos_token": True}, "tokenizer.ggml.bos_token_id names none"),
        (BYTE_PAIRS | {"add_bos_token": "false"}, "tokenizer.ggml.add_bos_token must be true or false, not 'false'"),
        (PIECES | {"add_eos_token": [True]}, "tokenizer.ggml.add_eos_token must be true or false"),
        (PIECES | {"add_space_prefix": "no"}, "tokenizer.ggml.add_space_prefix must be true or false"),
        (PIECES | {"scores": None}, "tokenizer.ggml.scores must be a list of numbers"),
        (PIECES | {"scores": [0.0]}, "scores has 1 entries"),
        (PIECES | {"scores": ["a"] * 274}, "tokenizer.ggml.scores must be a list of numbers"),
    ],
)
def test_invalid_metadata(tmp_path, metadata, message):
    with pytest.raises(UserError, match=message) as error:
        unpack(tmp_path, metadata)
    assert "model.gguf" in str(error.value) and "\n" not in str(error.value)


def test_a_vocabulary_larger_than_the_embedding(tmp_path):
    with pytest.raises(UserError, match="its vocabulary has 264 tokens, its embedding 263"):
        unpack(tmp_path, BYTE_PAIRS, vocab=263)


@pytest.mark.parametrize("kind", ["none", "no_vocab", None])
def test_a_file_without_a_tokenizer(tmp_path, kind):
    assert unpack(tmp_path, {"model": kind}) is None


def test_empty_tokens_and_no_token_types(tmp_path):
    changes = {"tokens": [*BYTE_PAIRS["tokens"], "", ""], "token_type": None, "pre": "gpt-2"}
    tokenizer = unpack(tmp_path, BYTE_PAIRS | changes)
    assert tokens_of(tokenizer, "hel") == ["hel"]
    assert tokenizer.convert_ids_to_tokens([264, 265]) == ["[EMPTY_264]", "[EMPTY_265]"]


# through a whole file


@pytest.fixture
def file(tmp_path) -> Path:
    """A random model with the byte pairs and a chat template."""
    tiny = zoo.build("llama", tmp_path / "checkpoint", vocab_size=len(BYTE_PAIRS["tokens"]))
    metadata = {f"tokenizer__ggml__{key}": value for key, value in BYTE_PAIRS.items()}
    metadata["tokenizer__chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    (tmp_path / "file").mkdir()
    return write_gguf(tmp_path / "file" / "model.gguf", tiny, **metadata)


def test_prompts_and_conversations_begin_with_one_bos(file):
    with LLM(str(file), device="cpu", dtype="float32", progress=False) as llm:
        prompts = ["hello", [{"role": "user", "content": "hello"}]]
        found = llm.generate(prompts, SamplingParams(max_tokens=1))
        assert llm.eos_ids == {1}
    assert [output.prompt_token_ids for output in found] == [[0, 263], [0, 263]]


def test_nothing_beside_the_file_is_read_or_run(file, monkeypatch):
    monkeypatch.setattr("builtins.input", None)
    (file.parent / "mine.py").write_text("raise SystemExit('run')")
    auto_map = {"AutoTokenizer": ["mine.Mine", "mine.Mine"], "AutoConfig": "mine.Mine"}
    (file.parent / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto_map}))
    beside = {"tokenizer_class": "Mine", "auto_map": auto_map, "chat_template": "x", "eos_token": "[x]"}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(beside))
    (file.parent / "tokenizer.json").write_text("{")
    (file.parent / "generation_config.json").write_text('{"eos_token_id": 9}')
    with LLM(str(file), device="cpu", dtype="float32", progress=False) as llm:
        assert llm.tokenizer.chat_template.startswith("{{ bos_token }}")
        assert llm.eos_ids == {1}
        assert llm.generate(["hello"], SamplingParams(max_tokens=1))[0].prompt_token_ids == [0, 263]
