"""Changes of a chat's messages around its template: system messages without a role, and a message to continue.

A template that has no system role drops system messages or rejects them.  Their text is then put into the user message
beside them.

A prompt that continues the last message ends inside of it.  `mark_end` appends a character to the message's content
that no valid text can contain; where the template has put it, `cut_at_end` ends the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.errors import InvalidRequest

END = "\ud800"  # a lone surrogate, and not one of the stand-ins of template_marks.py
# Whether a template trims messages is seen from whether this space, which follows END, is in the prompt.
_SPACE = " "


class RenderedChat(NamedTuple):
    """A rendered chat. `marks`: positions of the characters that begin or end the template's own control tokens."""

    text: str
    marks: frozenset[int]


def fold_system_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the text of system messages before that of the user message that follows them.

    Where none follows, it goes behind that of the user message before them; without one there, it becomes one.
    """
    folded: list[Mapping[str, Any]] = []
    texts: list[str] = []  # of system messages since the last other one
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "system" and isinstance(content, str):
            texts += [content] if content.strip() else []
            continue
        if role == "tool":  # results stay behind their calls
            folded.append(message)
            continue
        if texts and role == "user" and isinstance(content, str):
            message = {**message, "content": "\n\n".join([*texts, content])}
        else:
            _say_as_user(folded, texts)
        folded.append(message)
        texts = []
    _say_as_user(folded, texts)
    return folded


def _say_as_user(messages: list[Mapping[str, Any]], texts: list[str]) -> None:
    """Add texts to the last message if it is one of the user, or else as one."""
    if not texts:
        return
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        texts = [messages.pop()["content"], *texts]
    else:
        last = {"role": "user"}
    messages.append({**last, "content": "\n\n".join(texts)})


def mark_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with `END` after the content of the last one. Raises `InvalidRequest` if it has none."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise InvalidRequest(
            "continue_final_message is true, and the last message has no text to continue: give it a content",
            param="continue_final_message",
        )
    return [*messages[:-1], {**messages[-1], "content": content + END + _SPACE}]


def cut_at_end(chat: RenderedChat) -> RenderedChat:
    """Return the chat up to `END`. Raises `InvalidRequest` if the template has not written it.

    If the template trims messages, so does this; the content that is continued then ends with its last character that
    is not white space.
    """
    at = chat.text.rfind(END)
    if at < 0:
        raise InvalidRequest(
            "continue_final_message is true, and the model's chat template does not show the last message: end with "
            "another one",
            param="continue_final_message",
        )
    text = chat.text[:at]
    if not chat.text.startswith(_SPACE, at + 1):
        text = text.rstrip()
    return RenderedChat(text, frozenset(position for position in chat.marks if position < len(text)))


class WrittenArguments(str):
    """The arguments of a tool call that are not the text of a JSON object. `tojson` leaves them as the model wrote."""

    __slots__ = ()


def mark_written_arguments(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """Return the messages with `WrittenArguments` where arguments are text, and whether there are any."""
    marked = [_with_written_arguments(message) for message in messages]
    return (marked, True) if any(a is not b for a, b in zip(marked, messages)) else (messages, False)


def _with_written_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls") or ()
    if not any(isinstance(call["function"]["arguments"], str) for call in calls):
        return message
    changed = []
    for call in calls:
        function = call["function"]
        if isinstance(function["arguments"], str):
            function = {**function, "arguments": WrittenArguments(function["arguments"])}
        changed.append({**call, "function": function})
    return {**message, "tool_calls": changed}
