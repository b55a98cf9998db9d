"""The tokenizer of a folder, which its files describe, whatever class they name, and the tokens that end its texts."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from h2o_flexgen import LLM, Policy
from h2o_flexgen.errors import UserError
from h2o_flexgen.models.sentence_piece import surround
from h2o_flexgen.models.tokenizer import end_ids, load_tokenizer

pytest_plugins = ["command_tools"]

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEXT = "1234 cafe\u0301 it's  two\n"


@pytest.fixture
def folder(texts, tmp_path):
    return shutil.copytree(texts, tmp_path / "model")


def configure(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def described(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def add(folder, *tokens, special=True):
    """Put tokens into tokenizer.json; returns their ids."""
    from tokenizers import AddedToken

    found = described(folder)
    found.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    found.save(str(folder / "tokenizer.json"))
    return [found.token_to_id(token) for token in tokens]


@pytest.mark.parametrize(
    "name, model_type",
    [
        ("LlamaTokenizerFast", "llama"),
        ("Qwen2Tokenizer", "qwen2"),
        ("GPT2TokenizerFast", "qwen3"),
        ("BertTokenizerFast", "llama"),
        ("TokenizersBackend", "gpt_neox"),
        ("My", "qwen2"),
    ],
)
def test_a_text_is_split_according_to_the_file_whatever_class_is_named(folder, name, model_type):
    from tokenizers import pre_tokenizers

    found = described(folder)
    digits = pre_tokenizers.Digits(individual_digits=True)
    found.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    found.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    tokenizer = load_tokenizer(configure(folder, tokenizer_class=name, chat_template=CHATML))
    ids = found.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer(TEXT, add_special_tokens=False).input_ids == ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == TEXT
    assert (tokenizer.padding_side, tokenizer.eos_token_id, tokenizer.chat_template) == ("left", 2, CHATML)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "pointer of Git LFS.*git lfs pull"),
        (b'{"version": "1.0", "model": {"type": "BPE", "vo', "tokenizer.json.*download it again"),
        (b"", "tokenizer.json.*download it again"),
        (b"[]", "tokenizer.json.*download it again"),
        (b"\xff\xfe{}", "tokenizer.json.*download it again"),
    ],
)
def test_a_damaged_file(folder, content, message):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_a_link_to_a_missing_file(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("blob")
    with pytest.raises(UserError, match="tokenizer.json is a link to a file that is missing"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "does not hold a JSON object"),
        ('{"tok', "is not JSON"),
        ('{"eos_token": 5}', "eos_token"),
        ('{"model_max_length": "long"}', "load the tokenizer"),
    ],
)
def test_an_invalid_tokenizer_config(folder, content, message):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder)


def test_a_folder_without_a_vocabulary(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="it needs tokenizer.json, or vocab.json and merges.txt"):
        load_tokenizer(folder)


def metaspace(folder, scheme):
    """Turn tokenizer.json into one that puts blanks before words, as LLaMA's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    vocabulary = [*special, *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b", "▁a", "▁b"]
    ids = {token: number for number, token in enumerate(vocabulary)}
    merges = [("▁", "a"), ("▁", "b")]
    found = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    found.decoder = decoders.Sequence(steps)
    found.add_special_tokens(special)
    found.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("scheme, after", [("always", "▁b"), ("first", "b")])
def test_a_text_after_a_special_token_is_split_according_to_the_file(folder, scheme, after, legacy):
    metaspace(folder, scheme)
    tokenizer = load_tokenizer(configure(folder, tokenizer_class="LlamaTokenizerFast", legacy=legacy))
    assert tokenizer.tokenize("a</s>b") == ["▁a", "</s>", after]


@pytest.mark.parametrize("in_file", [None, "<s>"])
@pytest.mark.parametrize(
    "name, changes, around",
    [
        ("LlamaTokenizerFast", {"add_bos_token": True}, ["<s>"]),
        ("LlamaTokenizer", {"add_bos_token": False}, []),
        ("GemmaTokenizerFast", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "</s>"]),
        ("LlamaTokenizerFast", {"add_bos_token": False, "add_eos_token": True}, ["</s>"]),
        ("LlamaTokenizerFast", {"add_bos_token": None}, None),
        (None, {"add_bos_token": True}, ["<s>"]),
        ("PreTrainedTokenizerFast", {"add_bos_token": True, "add_eos_token": True}, None),  # does not read the keys
        ("PreTrainedTokenizerFast", {"add_bos_token": False}, None),
    ],
)
def test_bos_and_eos_around_a_text(folder, in_file, name, changes, around):
    found = described(folder)
    surround(found, in_file, None)
    found.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(configure(folder, tokenizer_class=name, bos_token="<s>", **changes))
    shown = tokenizer.convert_ids_to_tokens(tokenizer("a").input_ids)
    unchanged = [in_file] if in_file else []
    assert [token for token in shown if token != "a"] == (unchanged if around is None else around)


@pytest.mark.parametrize("name, start", [("$A", ["$A"]), ("<a:b:c>", ["<a:b:c>"]), ("", []), (None, [])])
def test_bos_of_any_name(folder, name, start):
    changes = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": name, "add_bos_token": True}
    tokenizer = load_tokenizer(configure(folder, **changes))
    assert tokenizer.convert_ids_to_tokens(tokenizer("a").input_ids) == [*start, "a"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pad_token": "!"}, "'!'"),
        ({"pad_token": "!", "eos_token": "a"}, "'!', 'a'"),
        ({"additional_special_tokens": ["e", "<x>"]}, "'e'"),
        ({"eos_token": "\n"}, r"'\\n'"),
        ({"unk_token": {"__type": "AddedToken", "content": "s"}}, "read as such: 's'"),
    ],
)
def test_special_tokens_that_are_ordinary_text(folder, caplog, changes, message):
    before = described(folder)
    tokenizer = load_tokenizer(configure(folder, **changes))
    text = "he!! said\né"
    assert tokenizer(text).input_ids == before.encode(text).ids
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    for name, token in changes.items():
        if token in ("!", "a"):
            assert tokenizer.convert_tokens_to_ids(getattr(tokenizer, name)) == before.token_to_id(token)
    assert re.search(message, caplog.text)


def test_tokens_missing_from_the_file_are_added(folder, caplog):
    named = {"9": {"content": "<one>", "special": True}, "8": {"content": "<two>", "special": False}}
    tokenizer = load_tokenizer(configure(folder, added_tokens_decoder=named, pad_token="[PAD]"))
    ids = tokenizer("a<one><two>[PAD]").input_ids[-3:]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<one>", "<two>", "[PAD]"]
    assert (tokenizer.decode(ids, skip_special_tokens=True), tokenizer.pad_token_id) == ("<two>", ids[2])
    assert not caplog.text


def test_code_beside_a_tokenizer_is_never_run(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", None)
    (folder / "mine.py").write_text("raise SystemExit('run')")
    configure(folder, tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]})
    assert load_tokenizer(folder)(TEXT).input_ids == described(folder).encode(TEXT).ids


def test_a_vocabulary_larger_than_that_of_the_model(folder):
    (token,) = add(folder, "<extra>")
    with LLM(str(folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        with pytest.raises(UserError, match=f"token {token} of this text, but the model's vocabulary has 300"):
            llm.generate(["a<extra>"])
        assert llm.generate(["a"])[0].outputs


def test_a_tokenizer_without_special_tokens(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer(["a", "b"]).input_ids
    assert not end_ids(tokenizer) & set(range(300))


# what ends a text


@pytest.mark.parametrize("space", ["", " ", "\n", "\n\n"])
@pytest.mark.parametrize("special", [True, False])
def test_a_text_ends_with_the_token_that_the_chat_template_puts_after_an_answer(folder, special, space):
    end, start = add(folder, "<|im_end|>", "<|im_start|>", special=special)
    template = CHATML.replace("<|im_end|>", space + "<|im_end|>")
    assert end_ids(load_tokenizer(configure(folder, chat_template=template))) == {2, end}


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}.<|im_end|>{% endfor %}",  # another token comes first
        "{% for m in messages %}{{ m.content }}. {% endfor %}",
        "{% for m in messages %}{{ m.content[0].text }}<|im_end|>{% endfor %}",  # shows no text
        "{{ raise_exception('no') }}",
        "{% for m in",
    ],
)
def test_a_template_that_puts_no_token_after_an_answer(folder, template):
    add(folder, "<|im_end|>", "\n", ".")
    ends = {2, described(folder).token_to_id(".")} if "}}." in template else {2}
    assert end_ids(load_tokenizer(configure(folder, chat_template=template))) - ends == set()


def test_a_text_ends_with_any_id_from_any_file(folder):
    end, _ = add(folder, "<|im_end|>", "<|im_start|>")
    configure(folder, chat_template=CHATML, eos_token="<s>")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    with LLM(str(folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        assert llm.eos_ids == {0, 7, 8, 9, end}


# SentencePiece


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A tokenizer.model of byte pairs with byte fallback, like LLaMA's."""
    pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    return train_pieces(tmp_path_factory.mktemp("pieces"))


def train_pieces(folder, **options):
    import sentencepiece

    lines = [f"the {n} models read and write the same words again, {n} times" for n in range(99)]
    usual = {
        "vocab_size": 400,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<|im_end|>"],
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "tokenizer"), **usual | options
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


PIECES_TEXTS = ["the models", "  two  blanks", "é 日本 😀\n\n", "a<|im_end|>b", "words 123, again"]


@pytest.mark.parametrize("named", [False, True])
def test_a_folder_with_only_a_tokenizer_model(pieces, tmp_path, named):
    from sentencepiece import SentencePieceProcessor

    folder = shutil.copytree(pieces, tmp_path / "model")
    if named:  # as Vicuna's
        config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True, "pad_token": None}
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHATML}))
    tokenizer = load_tokenizer(folder)
    processor = SentencePieceProcessor(str(folder / "tokenizer.model"))
    for text in PIECES_TEXTS[:3] + PIECES_TEXTS[4:]:
        assert tokenizer(text).input_ids == [1, *processor.encode(text)]
        assert tokenizer.decode(processor.encode(text)) == processor.decode(processor.encode(text))
    assert end_ids(tokenizer) == ({2, processor.piece_to_id("<|im_end|>")} if named else {2})


@pytest.mark.parametrize(
    "changes, around",
    [
        ({}, [1]),
        ({"add_bos_token": False, "add_eos_token": True}, [2]),
        ({"add_eos_token": True}, [1, 2]),
        ({"add_bos_token": None}, [1]),
        ({"eos_token": "a", "add_bos_token": False}, []),
    ],
)
def test_bos_and_eos_with_a_tokenizer_model(pieces, tmp_path, changes, around):
    folder = shutil.copytree(pieces, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps(changes))
    ids = load_tokenizer(folder)("the models").input_ids
    assert [id for id in ids if id < 3] == around and (1 not in around or ids[0] == 1)


@pytest.mark.parametrize(
    "changes, tokens",
    [
        ({}, "▁the</s>▁the<s>▁▁the"),
        ({"legacy": True}, "▁the</s>▁the<s>▁▁the"),
        ({"legacy": False}, "▁the</s>the<s>▁the"),
        ({"legacy": False, "add_prefix_space": False}, "the</s>the<s>▁the"),
        ({"add_prefix_space": False}, "the</s>the<s>▁the"),
    ],
)
def test_blanks_before_texts_with_a_tokenizer_model(pieces, tmp_path, changes, tokens):
    folder = shutil.copytree(pieces, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps(changes | {"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = load_tokenizer(folder)
    assert "".join(tokenizer.tokenize("the</s>the<s> the")) == tokens
    assert tokenizer.decode(tokenizer("the models").input_ids, skip_special_tokens=True) == "the models"


@pytest.mark.parametrize(
    "option, message",
    [
        ({"treat_whitespace_as_suffix": True}, "puts blanks after words"),
        ({"remove_extra_whitespaces": True}, "removes blanks"),
        ({"normalization_rule_name": "nfkc"}, "replaces characters"),
        ({"model_type": "unigram", "vocab_size": 300}, "not made of byte pairs"),
    ],
)
def test_an_unsupported_tokenizer_model(pieces, tmp_path, option, message):
    with pytest.raises(UserError, match=f"{message}.*a tokenizer.json beside it is needed"):
        load_tokenizer(train_pieces(tmp_path, **option))


def test_a_tokenizer_model_without_the_packages(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    monkeypatch.setattr("h2o_flexgen.models.tokenizer.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"extra sentencepiece: pip install 'h2o_flexgen\[sentencepiece\]'"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_model(pieces, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes((pieces / "tokenizer.model").read_bytes()[:-7])
    with pytest.raises(UserError, match="not a whole SentencePiece model"):
        load_tokenizer(tmp_path)
