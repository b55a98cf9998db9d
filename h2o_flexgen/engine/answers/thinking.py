"""Reasoning between tags, in front of the content of an answer."""

from __future__ import annotations

from h2o_flexgen.engine.answers.calls import Answer

#: the end of reasoning by its beginning: of Qwen3 and DeepSeek, and of Magistral
TAGS = {"<think>": "</think>", "[THINK]": "[/THINK]"}


def split(text: str, tag: str) -> Answer:
    """Reasoning and content of an answer. One that does not begin with the tag has no reasoning; one without the
    closing tag has nothing else."""
    begun = text.lstrip()
    if not begun.startswith(tag):
        return Answer(text)
    reasoning, _, content = begun.removeprefix(tag).partition(TAGS[tag])
    return Answer(content.lstrip("\n") or None, reasoning.strip("\n") or None)


def opening_of(turn: str, tag: str) -> str:
    """The tag, if the beginning of an answer, in the prompt, leaves it open."""
    return tag if turn.rfind(tag) > turn.rfind(TAGS[tag]) else ""
