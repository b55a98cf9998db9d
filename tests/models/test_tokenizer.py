"""The tokenizer of a folder: as its files describe it, whatever class they name, and the tokens that end its texts."""

from __future__ import annotations

import json
import shutil

import pytest

from h2o_flexgen import LLM, Policy
from h2o_flexgen.errors import UserError
from h2o_flexgen.models.tokenizer import end_ids, load_tokenizer

pytest_plugins = ["cli_tools"]

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


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gpt_neox"])
@pytest.mark.parametrize(
    "name", ["LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2TokenizerFast", "TokenizersBackend", "My"]
)
def test_a_text_is_split_as_the_file_says_whatever_class_is_named(folder, name, model_type):
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
def test_a_file_that_is_not_whole(folder, content, message):
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_a_link_to_a_file_that_is_missing(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("blob")
    with pytest.raises(UserError, match="tokenizer.json is a link to a file that is missing"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "content, message",
    [("[]", "does not hold a JSON object"), ('{"tok', "is not JSON"), ('{"eos_token": 5}', "eos_token")],
)
def test_a_tokenizer_config_that_makes_no_sense(folder, content, message):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder)


def test_a_folder_with_no_vocabulary(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="it needs tokenizer.json, or vocab.json and merges.txt"):
        load_tokenizer(folder)


def test_a_class_of_another_algorithm(folder):
    tokenizer = load_tokenizer(configure(folder, tokenizer_class="BertTokenizerFast"))
    assert tokenizer(TEXT).input_ids == described(folder).encode(TEXT).ids


def test_code_beside_a_tokenizer_is_never_run(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", None)
    (folder / "mine.py").write_text("raise SystemExit('run')")
    configure(folder, tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]})
    assert load_tokenizer(folder)(TEXT).input_ids == described(folder).encode(TEXT).ids


def test_a_vocabulary_larger_than_the_model_s(folder):
    (token,) = add(folder, "<extra>")
    with LLM(str(folder), Policy(), device="cpu", dtype="float32", progress=False) as llm:
        with pytest.raises(UserError, match=f"token {token} of this text, but the model's vocabulary has 300"):
            llm.generate(["a<extra>"])
        assert llm.generate(["a"])[0].outputs


def test_a_tokenizer_that_names_no_special_tokens(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer(["a", "b"]).input_ids
    assert not end_ids(tokenizer) & set(range(300))


# what ends a text


@pytest.mark.parametrize("special", [True, False])
def test_a_text_ends_at_what_the_chat_template_writes_behind_an_answer(folder, special):
    end, start = add(folder, "<|im_end|>", "<|im_start|>", special=special)
    tokenizer = load_tokenizer(configure(folder, chat_template=CHATML))
    assert end_ids(tokenizer) == {2, end}


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}\n<|im_end|>{% endfor %}",  # another token comes first
        "{% for m in messages %}{{ m.content }}. {% endfor %}",
        "{% for m in messages %}{{ m.content[0].text }}<|im_end|>{% endfor %}",  # shows no text
        "{{ raise_exception('no') }}",
        "{% for m in",
    ],
)
def test_a_template_that_ends_no_answer_with_a_token(folder, template):
    add(folder, "<|im_end|>", "\n", ".")
    ends = {2, described(folder).token_to_id(".")} if ". " in template else {2}
    assert end_ids(load_tokenizer(configure(folder, chat_template=template))) - ends == set()


def test_a_model_ends_its_texts_at_the_ids_of_all_its_files(folder):
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
    """A tokenizer.model of byte pairs that falls back to bytes, as LLaMA's."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    folder = tmp_path_factory.mktemp("pieces")
    lines = [f"the {n} models read and write the same words again, {n} times" for n in range(99)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


PIECES_TEXTS = ["the models", "  two  blanks", "é 日本 😀\n\n", "a<|im_end|>b", "words 123, again"]


@pytest.mark.parametrize("named", [False, True])
def test_a_folder_with_a_tokenizer_model_alone(pieces, tmp_path, named):
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


def test_a_tokenizer_model_without_a_bos_in_front(pieces, tmp_path):
    folder = shutil.copytree(pieces, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": True}))
    ids = load_tokenizer(folder)("the models").input_ids
    assert ids[0] != 1


def test_a_tokenizer_model_without_the_packages(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    monkeypatch.setattr("h2o_flexgen.models.tokenizer.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"extra sentencepiece: pip install 'h2o_flexgen\[sentencepiece\]'"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_model_that_is_damaged(pieces, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes((pieces / "tokenizer.model").read_bytes()[:-7])
    with pytest.raises(UserError, match="not a whole SentencePiece model"):
        load_tokenizer(tmp_path)
