"""The tokenizer of a model folder, and the tokens that end its texts."""

from __future__ import annotations

import json
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.files import read_json, read_text
from h2o_flexgen.models.folder import check_fetched
from h2o_flexgen.models.sentence_piece import read_pieces

#: a tokenizer as the library `tokenizers` reads it
_DESCRIBED = "tokenizer.json"
#: a tokenizer as SentencePiece reads it
_PIECES = "tokenizer.model"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_FILES = (_DESCRIBED, _CONFIG, "vocab.json", _PIECES)
#: texts that tokenizers take apart in different ways: blanks, digits, accents (composed and not), code, scripts, lines
_PROBES = (
    "Hello, world! It's what they've said: WE'LL see.",
    " a  b   c\td \n\n e\r\n",
    "1234567 3.14 2024-12-31",
    "café cafe\u0301 Straße ﬁ ½ İ",
    "def f(x):\n    return {'a': x[0] ** 2}  # TODO\n",
    "日本語の文章。中文，한국어 Привет עברית हिन्दी",
    "👍🏽😀 <b>&amp;</b> http://a.b/c?d=e_f",
)
#: stands for an answer in what a chat template makes of a conversation
_ANSWER = "[[the answer]]"

#: code that comes with a model is never run, and never asked about
_OPTIONS = {"padding_side": "left", "trust_remote_code": False}
#: what a tokenizer_config.json says of its class alone
_OF_CLASS = ("tokenizer_class", "auto_map", "add_bos_token", "add_eos_token", "sp_model_kwargs", "legacy")
#: files of a tokenizer beside the vocabulary
_BESIDE = ("special_tokens_map.json", "added_tokens.json", _TEMPLATE, "chat_template.json")

log = logging.getLogger(__name__)


def load_tokenizer(folder: Path):
    """The folder's tokenizer, padding on the left, or None if there is none. It splits text as its tokenizer.json says,
    if it has one, whatever its class in transformers would do.

    Raises:
        UserError: a file that is damaged or not fetched, a package that is missing, or a tokenizer that transformers
            cannot load.
    """
    _check_files(folder)
    if not has_tokenizer(folder):
        return None
    try:
        tokenizer = _loaded(folder)
    except UserError:
        raise
    except Exception as e:
        needed = "" if (folder / _DESCRIBED).exists() else "; it needs tokenizer.json, or vocab.json and merges.txt"
        raise UserError(f"cannot load the tokenizer of {folder}: {reason(e)}{needed}") from None
    template = folder / _TEMPLATE
    if tokenizer.chat_template is None and template.exists():  # transformers 4.45 does not read it
        tokenizer.chat_template = read_text(f"the chat template {template}", template)
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in _FILES)


def end_ids(tokenizer) -> frozenset[int]:
    """Token ids that end a text: the tokenizer's, and what its chat template writes behind an answer. None for no
    tokenizer."""
    if tokenizer is None:
        return frozenset()
    return frozenset({tokenizer.eos_token_id, _end_of_answer(tokenizer)} - {None})


def _check_files(folder: Path) -> None:
    """Raises UserError for a file that is not whole, or that no installed package can read."""
    for path in (folder / name for name in _FILES):
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a link to a file that is missing: download it again")
        check_fetched(path)
    if not isinstance(_config(folder), dict):
        raise UserError(f"{folder / _CONFIG} does not hold a JSON object")
    if _is_pieces(folder) and (find_spec("sentencepiece") is None or find_spec("google.protobuf") is None):
        extra = "pip install 'h2o_flexgen[sentencepiece]', or sentencepiece and protobuf by themselves"
        raise UserError(f"reading {folder / _PIECES} needs the extra sentencepiece: {extra}")


def _config(folder: Path) -> dict:
    path = folder / _CONFIG
    return read_json("the tokenizer's", path) if path.exists() else {}


def _is_pieces(folder: Path) -> bool:
    """Whether the folder's tokenizer is in SentencePiece's format alone."""
    others = (_DESCRIBED, "vocab.json")
    return (folder / _PIECES).exists() and not any((folder / name).exists() for name in others)


def _loaded(folder: Path):
    """Raises anything for a tokenizer that cannot be loaded."""
    pieces = read_pieces(folder / _PIECES) if _is_pieces(folder) else None
    if pieces is not None:
        return _of_pieces(folder, *pieces)
    import transformers

    described = _described(folder / _DESCRIBED)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_OPTIONS)
        if described is None or _alike(tokenizer, described):
            return tokenizer
        name = type(tokenizer).__name__
        log.warning("%s: %s of transformers splits text in another way than its tokenizer.json", folder, name)
    except Exception:  # such as a class that another version of transformers has
        if described is None:
            raise
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, **_OPTIONS)
    if not _alike(tokenizer, described):
        raise UserError(f"transformers {transformers.__version__} cannot build the tokenizer of {folder}: take another")
    return tokenizer


def _described(path: Path):
    """The tokenizer of a tokenizer.json by the library `tokenizers` alone, or None without that file."""
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(str(path))
    except Exception as e:
        raise UserError(f"cannot read {path} ({reason(e)}): download it again") from None
    found.no_padding()
    found.no_truncation()
    return found


def _of_pieces(folder: Path, tokenizer, special: dict[str, str]):
    """The tokenizer of a folder without a tokenizer.json, as if it had this one."""
    from transformers import PreTrainedTokenizerFast

    config = _config(folder)
    kept = {key: value for key, value in config.items() if value is not None and key not in _OF_CLASS}
    with TemporaryDirectory() as name:
        whole = Path(name)
        for beside in _BESIDE:
            if (folder / beside).exists():
                shutil.copy(folder / beside, whole)
        if not config.get("add_bos_token", True):
            tokenizer.post_processor = None
        tokenizer.save(str(whole / _DESCRIBED))
        (whole / _CONFIG).write_text(json.dumps(special | kept))
        return PreTrainedTokenizerFast.from_pretrained(whole, **_OPTIONS)


def _alike(tokenizer, described) -> bool:
    """Whether transformers' tokenizer makes of texts, and of tokens, what the file describes."""
    for text in _PROBES:
        ids = described.encode(text, add_special_tokens=False).ids
        if tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            return False
        back = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if back != described.decode(ids, skip_special_tokens=True):
            return False
    return True


def _end_of_answer(tokenizer) -> int | None:
    """The token that the chat template writes right behind an answer, if it is an added one, such as <|im_end|>."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is a program, and may refuse anything
        return None
    behind = text.partition(_ANSWER)[2]
    added = {how.content: token for token, how in tokenizer.added_tokens_decoder.items() if how.content.strip()}
    return added.get(max(filter(behind.startswith, added), key=len, default=None))
