"""Pre-tokenizers, which split a text into words before byte pairs are merged, by their names in GGUF files.

Names and properties are llama.cpp's (src/llama-vocab.cpp). Where its regular expressions only approximate those of a
model's tokenizer.json, because its engine lacks a feature, the model's are used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PreTokenizer:
    """A way to split texts."""

    #: regular expressions; each splits the pieces of the one before it into matches and the text between
    patterns: tuple[str, ...]
    add_bos: bool = False  # a text begins with a BOS token by default
    ignore_merges: bool = False  # a word in the vocabulary is one token even if the merges do not produce it


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_CASED = r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{1D400}-\x{1D7FF}]]"  # without mathematical letters
_ASIAN = r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_WIDE_PUNCTUATION = r"\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}"
_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"

DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
THREE_DIGITS = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS % '{1,3}'}",))
ONE_DIGIT = PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS % ''}",))
GPT2 = PreTokenizer((_GPT2,))
GPT2_ONE_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
LLAMA3 = replace(THREE_DIGITS, add_bos=True, ignore_merges=True)
TEKKEN = PreTokenizer((_BY_CASE % ("", "", ""),), add_bos=True, ignore_merges=True)
GPT4O = PreTokenizer((_BY_CASE % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),))
DEEPSEEK_LLM = PreTokenizer(
    ("[\r\n]", rf"\s?{_CASED}+", rf"\s?[!-/:-~{_WIDE_PUNCTUATION}]+", r"\s+$", _ASIAN, r"\p{N}+")
)
DEEPSEEK_CODER = PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"))
DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        _HAN_AND_KANA,
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
    )
)
BAILING = PreTokenizer((ONE_DIGIT.patterns[0].replace(r"\s*[\r\n]+", r"\s*[\r\n]"),))
SEED_CODER = PreTokenizer(
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)
)
MINICPM5 = PreTokenizer((r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS % '+'}"), ignore_merges=True)
QWEN35 = PreTokenizer(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
    )
)

#: by the value of tokenizer.ggml.pre
PRE_TOKENIZERS = {
    "default": DEFAULT,
    **dict.fromkeys(["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"], LLAMA3),
    **dict.fromkeys(["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], THREE_DIGITS),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan"], ONE_DIGIT),
    **dict.fromkeys(["stablelm2", "solar-open", "grok-2"], ONE_DIGIT),
    "qwen35": QWEN35,
    **dict.fromkeys(["gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais"], GPT2),
    **dict.fromkeys(["trillion", "granite-docling", "exaone4"], GPT2),
    **dict.fromkeys(["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"], GPT2_ONE_DIGIT),
    **dict.fromkeys(["minerva-7b", "mellum2"], GPT2_ONE_DIGIT),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "tekken": TEKKEN,
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], GPT4O),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], DEEPSEEK_V3),
    **dict.fromkeys(["bailingmoe", "bailingmoe2", "llada-moe"], BAILING),
    "seed-coder": SEED_CODER,
    "minicpm5": MINICPM5,
    "ufakzeka": PreTokenizer((_WORDS % "",)),
    "viking": PreTokenizer((_SENTENCES, r"\p{N}")),
    **dict.fromkeys(["poro-chat", "bloom", "gpt3-finnish"], PreTokenizer((_SENTENCES,))),
}
