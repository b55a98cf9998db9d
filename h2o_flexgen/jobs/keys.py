"""The keys of a row that control sampling, and those that are refused: one table for plain rows and for requests.

A key that would change the answer and cannot be honoured is an error, under the names of OpenAI, vLLM, transformers,
llama.cpp and others, whatever their case, hyphens and underscores. All other keys are the user's labels.
"""

from __future__ import annotations

import re
from dataclasses import fields
from functools import lru_cache

from h2o_flexgen.engine.structured import Structured
from h2o_flexgen.errors import UserError

#: keys that set a row's sampling: the types of each
SAMPLING = {
    "max_tokens": int,
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": int,
    "seed": int,
    "stop": (str, list),
    "stop_token_ids": list,
    "ignore_eos": bool,
    "min_p": (int, float),
    "min_tokens": int,
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "repetition_penalty": (int, float),
    "logit_bias": dict,
    "bad_words": (str, list),
    "allowed_token_ids": list,
    "n": int,
    "best_of": int,
    "top_logprobs": int,
    "prompt_logprobs": int,
}
#: keys that say what an output must match, with the field of `Structured` that each sets; None: several
STRUCTURED = {
    "response_format": None,
    "structured_outputs": None,
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
#: keys that would change the answer and are not supported: of OpenAI, of vLLM and SGLang, of transformers, of
#: llama.cpp, of Google, and ours, which hold for a whole job
UNSUPPORTED = """
stream echo suffix functions audio reasoning_effort verbosity web_search_options
logits_processors guided_decoding json_schema structural_tag ebnf stop_regex vllm_xargs lora_request
include_stop_str_in_output truncate_prompt_tokens add_special_tokens chat_template documents
prompt_embeds use_beam_search thinking_token_budget sampling_params extra_body
max_time early_stopping bad_words_ids force_words_ids suppress_tokens begin_suppress_tokens sequence_bias
forced_bos_token_id forced_eos_token_id generation_config
grammar
response_schema
kv_budget kv_rule hh_ratio hh_size recent_ratio recent_size
""".split()
#: the same, but harmless if they are 1
OFF_AT_1 = """
num_beams num_beam_groups num_return_sequences encoder_repetition_penalty length_penalty
typical_p guidance_scale repeat_penalty rep_pen tfs_z candidate_count
""".split()
#: or 0
OFF_AT_0 = """
min_length min_new_tokens no_repeat_ngram_size
diversity_penalty penalty_alpha epsilon_cutoff eta_cutoff freq_penalty dry_multiplier xtc_probability dynatemp_range
mirostat
""".split()
#: values of all unsupported keys that are harmless, besides empty ones
REFUSED = dict.fromkeys(UNSUPPORTED, ()) | dict.fromkeys(OFF_AT_1, (1,)) | dict.fromkeys(OFF_AT_0, (0,))
REFUSED |= {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "repeat_last_n": (0, 64),
    "top_n_sigma": (-1,),
    "response_mime_type": ("text/plain",),
}
#: other names of supported keys
ALIASES = {
    "max_tokens": "max_token max_new_tokens max_length max_output_tokens max_tokens_to_sample max_gen_len max_gen_toks "
    "gen_len n_predict num_predict",
    "temperature": "do_sample",
    "stop": "stopwords stop_words stop_sequence stop_sequences stop_string stop_strings stop_token stop_tokens "
    "eos_token",
    "stop_token_ids": "stop_token_id eos_token_id eos_token_ids",
    "ignore_eos": "ignore_eos_token",
    "seed": "random_seed",
    "chat_template_kwargs": "enable_thinking",
    "prompt_token_ids": "input_ids",
    "messages": "system system_prompt",
}
OTHER_NAMES = {alias: name for name, aliases in ALIASES.items() for alias in aliases.split()}
#: all supported keys of a row or a request, besides "prompt"
HONOURED = (
    SAMPLING.keys()
    | STRUCTURED.keys()
    | {
        "max_completion_tokens",
        "logprobs",
        "chat_template_kwargs",
        "prompt_token_ids",
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "continue_final_message",
        "add_generation_prompt",
    }
)
#: names above that are also common columns of data sets: labels in a plain row
COLUMNS = {"echo", "suffix", "stopwords", "min_length", "max_length", "input_ids"}
#: the same, but arguments of a chat in a row with messages
PROMPT_COLUMNS = {"audio", "documents", "functions", "verbosity"}
#: objects in which other systems keep the sampling of a row
OBJECTS = {"options", "parameters"}
#: names above for which false is not harmless
SWITCHES = {
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "add_special_tokens",
    "do_sample",
    "enable_thinking",
}


class RowError(UserError):
    """A row that cannot be run; `param`: the key at fault."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


def sampling(data: dict, is_body: bool = False) -> dict:
    """The `SamplingParams` that a plain row or the body of a request sets; null sets nothing.

    Raises:
        RowError: a value of a wrong type, or a key that would change the answer and is not supported. `SamplingParams`
            itself checks ranges.
    """
    labels = set() if is_body else _labels(data)
    for name, value in data.items():
        if (known := known_name(name)) not in labels:
            _check_key(name, known, value)
    found = {name: data[name] for name in SAMPLING if name in data and not is_empty(data[name])}
    if data.get("max_completion_tokens") is not None:  # the newer name takes precedence
        found["max_tokens"] = data["max_completion_tokens"]
    for name, value in found.items():
        is_flag = isinstance(value, bool)  # an int to Python
        if not isinstance(value, SAMPLING[name]) or is_flag != (SAMPLING[name] is bool):
            raise RowError(f"{name} cannot be {short(value)}", name)
        if isinstance(value, int) and abs(value) >= 1 << 64:
            raise RowError(f"{name} is too large", name)
    if (structured := structured_of(data)) is not None:
        found["structured"] = structured
    return found


def structured_of(data: dict) -> Structured | None:
    """What the output of a row or a request must match. Raises RowError for several, or one in a wrong form."""
    given = [name for name in STRUCTURED if not is_empty(data.get(name)) and data[name] != {"type": "text"}]
    if not given:
        return None
    name, *others = given
    if others:
        raise RowError(f"{name} and {others[0]} both say what the output must match: leave one out", others[0])
    try:
        found = Structured(**_fields_of(name, data[name]))
        found.check()
        return found
    except UserError as e:
        raise RowError(str(e), name) from None


def _fields_of(name: str, value) -> dict:
    """The fields of `Structured` that a key sets."""
    if STRUCTURED[name] is not None:
        return {STRUCTURED[name]: value}
    if not isinstance(value, dict):
        raise RowError(f"{name} must be an object, not {short(value)}", name)
    if name == "structured_outputs":
        known = {field.name for field in fields(Structured)}
        if unknown := [key for key in value if key not in known and not is_empty(value[key])]:
            raise RowError(f"structured_outputs: {unknown[0]} is not one of {', '.join(sorted(known))}", name)
        return {key: value[key] for key in known & value.keys()}
    kind = value.get("type")
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise RowError(f"response_format: type must be text, json_object or json_schema, not {short(kind)}", name)
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise RowError("response_format: json_schema needs an object with a schema", name)
    return {"json": inner["schema"]}


def _labels(row: dict) -> set[str]:
    """Names above that are labels in this plain row."""
    return COLUMNS if row.get("messages") is not None else COLUMNS | PROMPT_COLUMNS


def _check_key(name: str, known: str | None, value) -> None:
    """Raises RowError if `name` is not supported, and its value asks for something."""
    if name in OBJECTS and isinstance(value, dict):
        for inner in value:
            if known_name(inner) in SAMPLING.keys() | OTHER_NAMES.keys() and not is_empty(value[inner]):
                raise RowError(f"{name} is not read: write {inner} beside the prompt", name)
    if known is None or name in HONOURED or is_empty(value) or (value is False and known not in SWITCHES):
        return
    if known not in REFUSED:
        raise RowError(f"{name} is not a key of rows: use {OTHER_NAMES.get(known, known)}", name)
    if value not in REFUSED[known]:
        raise RowError(f"{name} is not supported: leave it out", name)


def is_empty(value) -> bool:
    """Whether a value asks for nothing, whatever its key: some clients write out every key."""
    return value is None or value in ("", [], {})


@lru_cache(1024)
def known_name(name: str) -> str | None:
    """The name in the tables above that a key spells; None for a label, as "N" is."""
    letters = _letters(name)
    if name in _NAMES or len(letters) < 4:
        return name if name in _NAMES else None
    return name.lower() if name.lower() in _NAMES else _SPELLINGS.get(letters)


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


_NAMES = HONOURED | REFUSED.keys() | OTHER_NAMES.keys()
_SPELLINGS = {_letters(name): name for name in (*HONOURED, *REFUSED, *OTHER_NAMES)}


def short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
