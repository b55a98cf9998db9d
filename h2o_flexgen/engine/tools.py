"""The functions that a model may call, as OpenAI's clients write them, checked before they reach a chat template."""

from __future__ import annotations

import re

from h2o_flexgen.errors import UserError

#: OpenAI's limits
MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolsError(UserError):
    """Tools that cannot be used; `param`: the key at fault, as in OpenAI's errors."""

    param = "tools"


def checked_tools(given) -> list[dict]:
    """A user's `tools`, which may be None, without keys that are None. Raises ToolsError unless they are a list of
    objects {"type": "function", "function": {"name", "description", "parameters"}} with different names."""
    if given is None:
        return []
    if not isinstance(given, (list, tuple)):
        raise ToolsError(f"tools must be a list of objects, not {given!r:.60}")
    if len(given) > MOST_TOOLS:
        raise ToolsError(f"{len(given)} tools are more than the {MOST_TOOLS} that a request may have")
    tools = [_checked_tool(n, tool) for n, tool in enumerate(given)]
    names = names_of(tools)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ToolsError(f"two tools have the name {twice!r}")
    return tools


def names_of(tools: list[dict]) -> tuple[str, ...]:
    return tuple(tool["function"]["name"] for tool in tools)


def _checked_tool(n: int, tool) -> dict:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        raise ToolsError(f"tool {n} must be of type function, not {kind!r:.60}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ToolsError(f'tool {n} lacks its "function", an object')
    function = {key: value for key, value in function.items() if value is not None}
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolsError(f'tool {n}: "name" must be up to 64 letters, digits, _ and -, not {name!r:.80}')
    for key, kind, words in (("description", str, "a text"), ("parameters", dict, "an object, a JSON Schema")):
        if not isinstance(function.get(key, kind()), kind):
            raise ToolsError(f'tool {n}, {name}: "{key}" must be {words}')
    if function.get("strict"):
        raise ToolsError(f'tool {n}, {name}: "strict" is not supported: leave it out')
    return {"type": "function"} | tool | {"function": function}
