"""The tokenizer, the chat template and the end-of-text ids of a GGUF file, by the rules of llama.cpp
(src/llama-vocab.cpp): missing metadata follow from the kinds of the tokenizer and the pre-tokenizer."""

from __future__ import annotations

import json
import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.models.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from h2o_flexgen.models.sentence_piece import Kind, add_tokens, is_control, merges_by_score, pieces_tokenizer, surround
from h2o_flexgen.models.spec import shortened

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from h2o_flexgen.models.gguf import GGUFFile

#: llama.cpp's names for a model without a tokenizer
NO_TOKENIZER = ("none", "no_vocab")
#: llama.cpp's names for SentencePiece's byte pairs, the same in an order of their own, and byte-level ones: the
#: tokenizers of the known architectures
SENTENCE_PIECE = "llama"
GEMMA4 = "gemma4"
BYTE_LEVEL = "gpt2"
#: default ids of special tokens
DEFAULT_IDS = {
    SENTENCE_PIECE: {"bos": 1, "eos": 2, "unknown": 0},
    GEMMA4: {},
    BYTE_LEVEL: {"bos": 11, "eos": 11},  # Falcon's; only used where that is a special token
}
#: also the end of struck-out text in HTML, and so an ordinary token of some vocabularies
HTML_END = "</s>"
#: tokens that end a text whether the metadata name them or not; `HTML_END` only where it is special
ENDS = frozenset(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜>
    [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]
    <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
    """.split()
)
#: in a vocabulary with a token of each set, <|end|> only ends a part of an answer
PARTS = ({"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"})
#: keys of ids that end a text
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

log = logging.getLogger(__name__)


def write_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Write the files of the tokenizer, if there is one, into a folder, with a generation_config.json for the ids that
    end a text. Raises UserError as `Vocabulary`, or if the folder cannot be written."""
    if file.field("tokenizer.ggml.model", "none") in NO_TOKENIZER:
        return
    try:
        vocabulary = Vocabulary(file)
        tokenizer = vocabulary.tokenizer()
        generation = {"eos_token_id": vocabulary.ends()}
        config = vocabulary.config()
    except UserError as e:
        raise UserError(f"{file.path}: {e}") from None
    except Exception as e:  # metadata may hold anything, and Rust's errors have no class of their own
        raise UserError(f"cannot read the tokenizer of {file.path}: {reason(e)}") from None
    try:
        tokenizer.save(str(folder / "tokenizer.json"))
    except Exception as e:  # an OSError, or one of Rust's
        raise UserError(f"cannot write the tokenizer of {file.path} into {folder}: {reason(e)}") from None
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))


class Vocabulary:
    """The vocabulary of a GGUF file. Raises UserError for an unsupported kind of tokenizer, or invalid metadata."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.kind = self._field("model")
        if self.kind not in DEFAULT_IDS:
            known = ", ".join(DEFAULT_IDS)
            raise UserError(f"no support for GGUF tokenizers of the kind {self.kind!r}; known: {known}")
        self.tokens = [text or f"[EMPTY_{n}]" for n, text in enumerate(self._list("tokens", str))]
        self.ids = {text: n for n, text in enumerate(self.tokens)}
        self.kinds = self._list("token_type", int, [Kind.NORMAL] * len(self.tokens))
        if len(self.ids) < len(self.tokens):
            raise UserError("its vocabulary contains a token twice")
        if len(self.tokens) > file.config["vocab_size"]:
            embedded = file.config["vocab_size"]
            raise UserError(f"its vocabulary has {len(self.tokens)} tokens, its embedding {embedded}")

    def _field(self, name: str, default=None):
        return self.file.field(f"tokenizer.ggml.{name}", default)

    def _list(self, name: str, kind: type, default: list | None = None) -> list:
        """A list of texts or numbers; unless it holds the tokens or merges, it has an entry for each token."""
        values = self._field(name, default)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            what = "texts" if kind is str else "numbers"
            raise UserError(f"tokenizer.ggml.{name} must be a list of {what}")
        if name not in ("tokens", "merges") and len(values) < len(self.tokens):
            raise UserError(f"tokenizer.ggml.{name} has {len(values)} entries for {len(self.tokens)} tokens")
        return values

    @cached_property
    def split(self) -> PreTokenizer:
        """How text is split before byte pairs are merged."""
        name = self._field("pre")
        if name is None:
            log.warning("%s does not name its pre-tokenizer: tokens may be wrong", self.file.path)
            name = "default"
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            raise UserError(f"its pre-tokenizer {name!r} is unknown; use the model's checkpoint instead")
        return PRE_TOKENIZERS[name]

    def token(self, name: str) -> int | None:
        """The id of the special token `name`, or its default."""
        found = self._field(f"{name}_token_id")
        if isinstance(found, int) and 0 <= found < len(self.tokens):
            return found
        default = DEFAULT_IDS[self.kind].get(name, -1)
        return default if 0 <= default < len(self.tokens) and self.is_special(default) else None

    def is_special(self, token: int) -> bool:
        """Whether a token stands for no text: a control token, or one that ends a text."""
        kind = self.kinds[token]
        text = self.tokens[token]
        return is_control(kind) or (text in ENDS and (text != HTML_END or kind == Kind.USER_DEFINED))

    def ends(self) -> list[int]:
        """Ids of the tokens that end a text."""
        has_parts = not any(self.ids.keys().isdisjoint(names) for names in PARTS)
        names = ENDS - {"<|end|>"} if has_parts else ENDS
        found = {self.ids[text] for text in names & self.ids.keys() if self.is_special(self.ids[text])}
        return sorted(found | {token for name in END_KEYS if (token := self.token(name)) is not None})

    def config(self) -> dict:
        """The tokenizer_config.json of an equivalent checkpoint."""
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        found = {key: self.token(name) for name, key in names.items()}
        config = {key: self.tokens[token] for key, token in found.items() if token is not None}
        template = self.file.field("tokenizer.chat_template")
        if isinstance(template, str):
            config["chat_template"] = template
        return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}

    def tokenizer(self) -> Tokenizer:
        is_pieces = self.kind != BYTE_LEVEL
        tokenizer = self._pieces() if is_pieces else self._byte_level()
        add_tokens(tokenizer, self.tokens, self.kinds, self.is_special)
        surround(tokenizer, self._edge("bos", is_pieces or self.split.add_bos), self._edge("eos", False))
        return tokenizer

    def _edge(self, name: str, default: bool) -> str | None:
        """The token at the start (bos) or the end (eos) of every text, if any."""
        asked = self._flag(f"add_{name}_token")
        if self.kind == GEMMA4 and name == "bos":  # some files deny what the model needs
            asked = None
        token = self.token(name)
        if asked and token is None:
            raise UserError(f"texts begin or end with a {name} token, but tokenizer.ggml.{name}_token_id names none")
        is_wanted = default if asked is None else asked
        if is_wanted and token is None:
            log.warning("%s names no %s token, which such texts begin or end with", self.file.path, name)
        return self.tokens[token] if is_wanted and token is not None else None

    def _flag(self, name: str) -> bool | None:
        value = self._field(name)
        if value not in (None, False, True):
            raise UserError(f"tokenizer.ggml.{name} must be true or false, not {shortened(value)}")
        return None if value is None else bool(value)

    def _pieces(self) -> Tokenizer:
        unknown = self.token("unknown")
        name = None if unknown is None else self.tokens[unknown]
        if self.kind == GEMMA4:
            return pieces_tokenizer(self.ids, self._merges(), name, "never")
        merges = merges_by_score(self.ids, self._list("scores", (int, float)))
        scheme = "never" if self._flag("add_space_prefix") is False else "always"
        return pieces_tokenizer(self.ids, merges, name, scheme)

    def _byte_level(self) -> Tokenizer:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        tokenizer = Tokenizer(models.BPE(self.ids, self._merges(), ignore_merges=self.split.ignore_merges))
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.split.patterns]
        to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_letters])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _merges(self) -> list[tuple[str, str]]:
        """The pairs of tokens that are merged, in order of priority, without impossible ones."""
        merges = []
        for merge in self._list("merges", str):
            at = merge.find(" ", 1)
            pair = (merge[:at], merge[at + 1 :])
            if at < 0 or not self.ids.keys() >= {*pair}:
                continue
            if "".join(pair) not in self.ids:
                raise UserError(f"its merge {shortened(merge)} makes a token that its vocabulary lacks")
            merges.append(pair)
        return merges
