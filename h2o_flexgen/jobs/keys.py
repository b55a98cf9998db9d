"""What a row may say of its sampling, and what it may not: one table for plain rows and for requests.

A key that would change the answer and cannot be honoured is an error, whoever's name for it is used: OpenAI's, vLLM's,
those of transformers, llama.cpp and Ollama, or a misspelt one. Other keys are labels of the user's.
"""

from __future__ import annotations

import difflib
import re
from functools import cache

from h2o_flexgen.errors import UserError

#: what a row may say of its sampling: the types of each
SAMPLING = {
    "max_tokens": int,
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": int,
    "seed": int,
    "stop": (str, list),
    "stop_token_ids": list,
    "ignore_eos": bool,
}
#: what would change the answer and cannot be done: the values that ask for nothing, as null does
REFUSED = {
    # OpenAI
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    # vLLM, SGLang
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "structured_outputs": (),
    "json_schema": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "prompt_embeds": (),
    "use_beam_search": (False,),
    "thinking_token_budget": (),
    "sampling_params": ({},),
    "extra_body": ({},),
    # transformers
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "length_penalty": (1,),
    "diversity_penalty": (0,),
    "early_stopping": (False,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "generation_config": ({},),
    # llama.cpp, Ollama
    "repeat_penalty": (1,),
    "mirostat": (0,),
    "tfs_z": (1,),
    # ours, of a whole job
    "kv_budget": (),
    "kv_rule": (),
    "hh_ratio": (),
    "hh_size": (),
    "recent_ratio": (),
    "recent_size": (),
}
#: other names for what a row may say
OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_gen_toks": "max_tokens",
    "gen_len": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "do_sample": "temperature",
    "eos_token_id": "stop_token_ids",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "random_seed": "seed",
    "enable_thinking": "chat_template_kwargs",
    "input_ids": "prompt_token_ids",
    "system": "messages",
    "system_prompt": "messages",
}
#: read elsewhere
_READ = {"max_completion_tokens", "logprobs", "chat_template_kwargs", "prompt_token_ids", "messages"}


class RowError(UserError):
    """A row that cannot be run; `param` is what of it is to blame."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


def sampling(data: dict) -> dict:
    """The `SamplingParams` that a plain row or the body of a request sets; null sets nothing.

    Raises:
        RowError: a value of a wrong type, or something that would change the answer and cannot be done. Which values
            are in range `SamplingParams` knows.
    """
    _refuse(data)
    found = {name: data[name] for name in SAMPLING if data.get(name) is not None}
    if data.get("max_completion_tokens") is not None:  # the newer name wins
        found["max_tokens"] = data["max_completion_tokens"]
    for name, value in found.items():
        is_flag = isinstance(value, bool)  # which Python takes for a number
        if not isinstance(value, SAMPLING[name]) or is_flag != (SAMPLING[name] is bool):
            raise RowError(f"{name} cannot be {short(value)}", name)
        if isinstance(value, int) and abs(value) >= 1 << 64:
            raise RowError(f"{name} is too large", name)
    return found


def _refuse(data: dict) -> None:
    for name, value in data.items():
        if value is None:
            continue
        if name in REFUSED and value not in REFUSED[name]:
            raise RowError(f"{name} is not supported: leave it out", name)
        if right := right_name(name):
            raise RowError(f"{name} is not a key of rows: use {right}", name)


@cache
def right_name(name: str) -> str | None:
    """What a key is called here if it has another name, or is misspelt; None for one that is known, or a label."""
    if name in SAMPLING or name in REFUSED or name in _READ:
        return None
    letters = _letters(name)
    if len(letters) > 3 and letters in _SPELLINGS:
        return _SPELLINGS[letters]
    # a label such as "function" or "in_tokens" must not be taken for a key
    candidates = [known for known in (*SAMPLING, *REFUSED, *_READ) if "_" in known or known == "temperature"]
    near = difflib.get_close_matches(name, [known for known in candidates if known[0] == name[:1]], 1, 0.9)
    return near[0] if near and len(name) > 7 else None


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


_SPELLINGS = {_letters(name): name for name in (*SAMPLING, *REFUSED, *_READ)}
_SPELLINGS |= {_letters(name): right for name, right in OTHER_NAMES.items()}


def short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
