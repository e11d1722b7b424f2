"""Tools for models whose chat template has no place for them: everything that concerns tools becomes text.

The tools and the form of a call are described in the system message, or else before the first user's text.  Calls
become text of that form, and results become a user's text.
"""

from __future__ import annotations

from typing import Any

from pipeline.api.json_body import to_json

_INSTRUCTIONS = """# Tools

You may call functions to answer. Each line is the description of one function:

<tools>
{tools}
</tools>

To call a function, answer with its name and its arguments as a JSON object in this form, once for each call:

<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>

The results are sent to you in <tool_response></tool_response>. Without need for a function, answer as usual."""


def has_tools(messages: list[dict[str, Any]]) -> bool:
    """Whether a message has tool calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which tools, calls and results are text."""
    plain: list[dict[str, Any]] = []
    is_result = False  # the last message has results: more text of the user is added to it
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if is_result and role in ("tool", "user"):
            plain[-1] = {"role": "user", "content": f"{plain[-1]['content']}\n{content}"}
        elif role == "tool":
            plain.append({"role": "user", "content": content})
        elif role == "assistant":
            parts = [content] if content else []
            parts += [_call_text(call["function"]) for call in message.get("tool_calls", ())]
            plain.append({"role": role, "content": "\n".join(parts)})
        else:
            plain.append(message)
        is_result = role == "tool"
    return _with_instructions(plain, tools) if tools else plain


def _call_text(function: dict[str, Any]) -> str:
    name, arguments = to_json(function["name"]).decode(), function["arguments"]
    if not isinstance(arguments, str):  # else it is what a model wrote instead of an object
        arguments = to_json(arguments).decode()
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _with_instructions(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    text = _INSTRUCTIONS.format(tools="\n".join(to_json(tool["function"]).decode() for tool in tools))
    for index, message in enumerate(messages[:2]):
        if message["role"] == "system":
            changed = {**message, "content": f"{message['content']}\n\n{text}"}
        elif message["role"] == "user":
            changed = {**message, "content": f"{text}\n\n{message['content']}"}
        else:
            continue
        return [*messages[:index], changed, *messages[index + 1 :]]
    return [{"role": "system", "content": text}, *messages]
