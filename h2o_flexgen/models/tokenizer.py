"""The tokenizer of a model folder, and the tokens that end its texts."""

from __future__ import annotations

import json
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.models.folder import check_fetched
from h2o_flexgen.models.sentence_piece import BLANK, read_pieces, surround
from h2o_flexgen.utils.files import read_json, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: a tokenizer as the library `tokenizers` reads it
_DESCRIBED = "tokenizer.json"
#: a tokenizer as SentencePiece reads it
_PIECES = "tokenizer.model"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_FILES = (_DESCRIBED, _CONFIG, "vocab.json", _PIECES)
#: placeholder for an answer in a conversation
ANSWER = "[[the answer]]"

#: code that comes with a model is never run
_OPTIONS = {"padding_side": "left", "trust_remote_code": False, "from_slow": False}
#: keys of a tokenizer_config.json that only its class reads
_OF_CLASS = ("tokenizer_class", "auto_map", "sp_model_kwargs", "legacy")
#: prefixes of the names of classes that heed the keys of `_SURROUNDING`
_HEEDING = ("Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX")
_SURROUNDING = ("add_bos_token", "add_eos_token")
#: files with names of tokens and chat templates
_COMPANIONS = ("special_tokens_map.json", "added_tokens.json", _TEMPLATE, "chat_template.json")

log = logging.getLogger(__name__)


def load_tokenizer(folder: Path):
    """The folder's tokenizer, padding on the left, or None if there is none. If there is a tokenizer.json it is
    followed, even where transformers' class would not. Raises UserError for a damaged or missing file, a missing
    package, or a tokenizer that transformers cannot load."""
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
    """Token ids that end a text: the tokenizer's and the one its chat template puts after an answer; empty for None."""
    if tokenizer is None:
        return frozenset()
    return frozenset({tokenizer.eos_token_id, _end_of_answer(tokenizer)} - {None})


def _check_files(folder: Path) -> None:
    """Raises UserError for an incomplete file, or one that no installed package can read."""
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
    """Whether the folder's tokenizer is only in SentencePiece's format."""
    others = (_DESCRIBED, "vocab.json")
    return (folder / _PIECES).exists() and not any((folder / name).exists() for name in others)


def _loaded(folder: Path):
    """Raises an exception of any class for a tokenizer that cannot be loaded."""
    from transformers import AutoTokenizer

    config = {key: value for key, value in _config(folder).items() if value is not None}
    if _is_pieces(folder):
        scheme = "first" if config.get("legacy") is False else "always"
        described, special = read_pieces(folder / _PIECES, scheme if config.get("add_prefix_space", True) else "never")
        tokenizer = _of_pieces(folder, described, special | config)
        asking = {"add_bos_token": True} | config
    elif (folder / _DESCRIBED).exists():
        described = _described(folder / _DESCRIBED)
        tokenizer = _named(folder)
        asking = config if str(config.get("tokenizer_class", "Llama")).startswith(_HEEDING) else {}
    else:
        return AutoTokenizer.from_pretrained(folder, **_OPTIONS)
    _follow(tokenizer, described, folder)
    if not asking.keys().isdisjoint(_SURROUNDING):
        _surround(tokenizer, described, asking)
    tokenizer("a")  # invalid settings raise here rather than during a job
    return tokenizer


def _described(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, read by the library `tokenizers` alone."""
    from tokenizers import Tokenizer

    try:
        described = Tokenizer.from_file(str(path))
    except Exception as e:
        raise UserError(f"cannot read {path} ({reason(e)}): download it again") from None
    described.no_padding()
    described.no_truncation()
    return described


def _of_pieces(folder: Path, described: Tokenizer, config: dict):
    """transformers' tokenizer of a folder without a tokenizer.json, as if it had `described`."""
    from transformers import PreTrainedTokenizerFast

    with TemporaryDirectory() as name:
        complete = Path(name)
        for companion in _COMPANIONS:
            if (folder / companion).exists():
                shutil.copy(folder / companion, complete)
        described.save(str(complete / _DESCRIBED))
        general = {key: value for key, value in config.items() if key not in _OF_CLASS}
        (complete / _CONFIG).write_text(json.dumps(general))
        return PreTrainedTokenizerFast.from_pretrained(complete, **_OPTIONS)


def _named(folder: Path):
    """A tokenizer of the class that the folder names, or of the general class if that fails."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **_OPTIONS)
    except Exception:  # such as a class of another version of transformers
        tokenizer = None
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer
    return PreTrainedTokenizerFast.from_pretrained(folder, **_OPTIONS)


def _follow(tokenizer, described: Tokenizer, folder: Path) -> None:
    """Make transformers' tokenizer split texts as described. It keeps its templates, its names of special tokens, and
    its own added tokens unless they are ordinary text in the description."""
    known = {token.content for token in described.get_added_tokens_decoder().values()}
    added = [token for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.content not in known]
    ordinary = {token.content for token in added if _is_ordinary(described, token.content)}
    described.add_tokens([token for token in added if token.content not in ordinary])
    tokenizer._tokenizer = described
    for name, content in tokenizer.special_tokens_map.items():
        if isinstance(content, str) and content in ordinary and described.token_to_id(content) is None:
            setattr(tokenizer, name, None)
    if ordinary:
        names = ", ".join(map(repr, sorted(ordinary)))
        log.warning("%s: special tokens that are ordinary text are read as such: %s", folder, names)


def _is_ordinary(described: Tokenizer, text: str) -> bool:
    """Whether a text is one token, possibly after a blank, without being an added token."""
    found = described.encode(text, add_special_tokens=False)
    return sum(token != BLANK for token in found.tokens) == 1 and described.decode(found.ids) == text


def _surround(tokenizer, described: Tokenizer, config: dict) -> None:
    """Add BOS before texts and EOS after them, or remove them, where a tokenizer_config.json has keys for that."""
    ids = described.encode("a").ids
    names = []
    for role, outermost in (("bos", ids[:1]), ("eos", ids[-1:])):
        name = tokenizer.special_tokens_map.get(f"{role}_token", "")
        token = described.token_to_id(name)
        asked = config.get(f"add_{role}_token")
        is_wanted = asked if isinstance(asked, bool) else outermost == [token]
        names.append(name if is_wanted and token is not None else None)
    surround(described, *names)


def _end_of_answer(tokenizer) -> int | None:
    """The token that the chat template puts after an answer, if it is an added one, such as <|im_end|>."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is a program, and may refuse anything
        return None
    rest = text.partition(ANSWER)[2].lstrip()
    added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return added.get(max(filter(rest.startswith, added), key=len, default=None))
