"""A key of a row is honoured, refused, or an ignored label, in plain rows as in requests."""

from __future__ import annotations

import json

import pytest
from command_tools import write_rows

from h2o_flexgen.errors import UserError
from h2o_flexgen.jobs.input import read_rows
from h2o_flexgen.jobs.keys import COLUMNS, OTHER_NAMES, PROMPT_COLUMNS, REFUSED, SAMPLING, SWITCHES, RowError

#: (key, value, what the error says)
REFUSALS = [
    ("num_beams", 3, "num_beams is not supported"),
    ("length_penalty", 1.2, "length_penalty is not supported"),
    ("logit_bias", [5], "logit_bias cannot be [5]"),
    ("response_format", {"type": "xml"}, "type must be text, json_object or json_schema"),
    ("response_format", {"type": "json_schema"}, "json_schema needs an object with a schema"),
    ("structured_outputs", {"xml": 1}, "structured_outputs: xml is not one of"),
    ("guided_choice", ["a", 1], "choice must be a list of texts"),
    ("tools", [{"type": "function"}], "tools is for messages"),
    ("top_logprobs", 5, "top_logprobs needs logprobs"),
    ("extra_body", {"top_k": 5}, "extra_body is not supported"),
    ("hh_ratio", 0.2, "hh_ratio is not supported"),
    ("max_new_tokens", 5, "max_new_tokens is not a key of rows: use max_tokens"),
    ("do_sample", True, "use temperature"),
    ("eos_token_id", 5, "use stop_token_ids"),
    ("stop_sequences", ["a"], "use stop"),
    ("system", "Be short.", "use messages"),
    ("enable_thinking", False, "use chat_template_kwargs"),
    ("maxTokens", 5, "maxTokens is not a key of rows: use max_tokens"),
    ("max-tokens", 5, "use max_tokens"),
    ("Temperature", 1, "use temperature"),
    ("max_token", 5, "use max_tokens"),
    ("topK", 5, "use top_k"),
    ("ignore_eos_token", True, "use ignore_eos"),
    ("options", {"temperature": 0.5, "num_ctx": 4096}, "options is not read: write temperature beside"),
    ("parameters", {"max_new_tokens": 5}, "parameters is not read: write max_new_tokens beside"),
    ("stop_token_ids", 5, "stop_token_ids cannot be 5"),
    ("max_tokens", 16.0, "max_tokens cannot be 16.0"),
    ("max_tokens", 10**30, "max_tokens is too large"),
    ("seed", True, "seed cannot be True"),
    ("temperature", "0.5", "temperature cannot be '0.5'"),
]
LABELS = """id label labels answer options function in_tokens top_words N format index message name template text url
temperature_c temperatures structured_output allowed_tokens sampling_param web_search_option prompt_logprob stop_reason
Documents audio documents functions echo seed_id suffix Suffix stopwords min_length max_length verbosity input_ids"""


def plain(**keys) -> dict:
    return {"prompt_token_ids": [5]} | keys


def completion(**keys) -> dict:
    body = {"prompt": [5]} | keys
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}


def row_of(tmp_path, row: dict | str):
    (found,) = read_rows(str(write_rows(tmp_path / "rows.jsonl", [row])))
    return found


@pytest.mark.parametrize("form", [plain, completion])
@pytest.mark.parametrize("key, value, say", REFUSALS)
def test_keys_that_would_change_the_answer_are_refused(tmp_path, form, key, value, say):
    error = row_of(tmp_path, form(**{key: value})).prompt
    assert isinstance(error, RowError) and say in str(error) and error.param == key


@pytest.mark.parametrize("form", [plain, completion])
def test_harmless_values_are_accepted(tmp_path, form):
    """Some clients write out every key."""
    neutral = {name: values[0] for name, values in REFUSED.items() if values}
    nulls = dict.fromkeys([*SAMPLING, *(REFUSED.keys() - neutral), *OTHER_NAMES])
    row = row_of(tmp_path, form(**neutral, **(nulls if form is plain else dict.fromkeys(SAMPLING))))
    assert row.prompt == [5] and row.params == {}


@pytest.mark.parametrize("form", [plain, completion])
@pytest.mark.parametrize("value", ["", [], {}, False], ids=repr)
def test_empty_values_are_accepted(tmp_path, form, value):
    names = [*REFUSED, *OTHER_NAMES, "chat_template_kwargs"]
    if value is False:
        names = REFUSED.keys() - SWITCHES
    row = row_of(tmp_path, form(**dict.fromkeys(names, value)))
    assert row.prompt == [5] and row.params == {}


def test_a_name_that_data_sets_use_is_meant_for_the_model_in_a_request(tmp_path):
    for name in COLUMNS | PROMPT_COLUMNS:
        error = row_of(tmp_path, completion(**{name: [7]})).prompt
        assert isinstance(error, RowError) and error.param == name


def test_a_name_of_chats_is_meant_for_the_model_beside_messages(tmp_path):
    messages = [{"role": "user", "content": "a"}]
    for name in PROMPT_COLUMNS:
        error = row_of(tmp_path, {"messages": messages, name: ["b"]}).prompt
        assert isinstance(error, RowError) and error.param == name
    row = row_of(tmp_path, {"messages": messages} | dict.fromkeys(COLUMNS, "x"))
    assert row.prompt.messages == messages


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "messages": None, "prompt_token_ids": None},
        {"prompt": None, "messages": [{"role": "user", "content": "a"}]},
        {"prompt": None, "prompt_token_ids": [5], "url": None, "body": None, "max_tokens": None},
        completion() | {"prompt": None, "messages": None, "max_tokens": None},
    ],
)
def test_null_is_absent(tmp_path, row):
    """A table writes null in the columns that a row lacks."""
    assert not isinstance(row_of(tmp_path, row).prompt, UserError)


def test_other_keys_are_labels(tmp_path):
    row = row_of(tmp_path, plain(**dict.fromkeys(LABELS.split(), "x")))
    assert row.prompt == [5] and row.params == {}


def test_a_row_sets_its_own_sampling(tmp_path):
    given = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 3, "stop": ["a"]}
    given |= {"stop_token_ids": [7, 8], "ignore_eos": True}
    given |= {"min_p": 0.1, "min_tokens": 2, "presence_penalty": 1, "frequency_penalty": -0.5}
    given |= {"repetition_penalty": 1.1, "logit_bias": {"5": -100}, "bad_words": ["b"], "allowed_token_ids": [1, 2]}
    given |= {"n": 2, "best_of": 3, "prompt_logprobs": 0}
    assert given.keys() == SAMPLING.keys() - {"top_logprobs"}
    for form in (plain, completion):
        assert row_of(tmp_path, form(**given)).params == given


@pytest.mark.parametrize(
    "key, value, say",
    [
        ("max_tokens", 5, "max_tokens belongs in the body"),
        ("logprobs", True, "logprobs belongs in the body"),
        ("chat_template_kwargs", {"a": 1}, "chat_template_kwargs belongs in the body"),
        ("maxTokens", 5, "use max_tokens"),
        ("length_penalty", 1.2, "length_penalty is not supported"),
    ],
)
def test_a_key_beside_the_body_of_a_request_is_not_lost(tmp_path, key, value, say):
    error = row_of(tmp_path, completion() | {key: value}).prompt
    assert say in str(error) and error.param == key
    assert row_of(tmp_path, completion() | {key: None}).prompt == [5]


@pytest.mark.parametrize(
    "row, say",
    [
        ('{"prompt": "a", "temperature": 0, "temperature": 1}', "the key 'temperature' appears twice"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' appears twice"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "the key 'content' appears twice"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "not both"),
        ('{"prompt_token_ids": [5], "messages": [{"role": "user", "content": "b"}]}', "not both"),
        ('{"prompt": null, "messages": null}', 'no "prompt", "prompt_token_ids" or "messages"'),
        ('{"prompt": "a", "chat_template_kwargs": {"enable_thinking": false}}', "is for messages"),
        ('{"messages": [{"role": "user", "content": "b"}], "chat_template_kwargs": [1]}', "must be an object"),
        ('{"prompt": "a", "max_tokens": NaN}', "max_tokens cannot be nan"),
        ('{"prompt": "a", "max_tokens": Infinity}', "max_tokens cannot be inf"),
    ],
)
def test_a_row_that_says_two_things_is_refused(tmp_path, row, say):
    found = row_of(tmp_path, row)
    assert isinstance(found.prompt, UserError) and say in str(found.prompt)


def test_the_text_of_token_ids_may_stand_beside_them(tmp_path):
    assert row_of(tmp_path, {"prompt": "a", "prompt_token_ids": [5]}).prompt == [5]


def test_rows_whose_names_differ_only_in_half_a_surrogate_pair_draw_other_numbers(tmp_path):
    names = ["a\ud800", "a\udc00", "a?", "a\ufffd"]
    rows = read_rows(str(write_rows(tmp_path / "rows.jsonl", [json.dumps(plain(custom_id=name)) for name in names])))
    assert len({row.key for row in rows}) == len(names)
    (row,) = read_rows(str(write_rows(tmp_path / "rows.jsonl", [plain(custom_id="grüße")])))
    assert row.key == 0x8285D1AD84C6B6E  # must never change
