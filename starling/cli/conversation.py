"""The state of `starling chat` and its /commands; pure, apart from /save and /load.

A line that begins with a slash is a command; `//` at the beginning stands for a slash. `\"\"\"` begins and ends a
message of several lines, and a backslash at the end of a line continues it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config.user_home import expand_user
from pipeline.errors import InvalidRequest
from pipeline.files import replace_file
from starling.cli.generation_options import check_setting

QUOTES = '"""'
MAX_FILE = 64 << 20  # bytes of a saved conversation
ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """What the user has typed: a message for the model, or a command."""

    text: str


class Command(NamedTuple):
    """A /command and the rest of its line."""

    name: str
    argument: str


class Ended(Exception):
    """/bye."""


class Discarded(Exception):
    """The user has cancelled a message while typing it."""


def read_input(lines: Callable[[bool], str | None]) -> Iterator[Message | Command]:
    """Messages and commands. `lines(is_continued)` returns the next line without its newline, None at the end.

    It may raise `Discarded` within a message.
    """
    while (line := lines(False)) is not None:
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line[1:].strip().partition(" ")
            yield Command(name, argument.strip())
            continue
        try:
            text = _whole_message(line, lines)
        except Discarded:
            continue
        if text.strip():
            yield Message(text[1:] if text.startswith("//") else text)


def _whole_message(line: str, lines: Callable[[bool], str | None]) -> str:
    parts = [line]
    if line.lstrip().startswith(QUOTES):
        parts = [line.lstrip().removeprefix(QUOTES)]
        while not parts[-1].rstrip().endswith(QUOTES):
            following = lines(True)
            if following is None:
                return "\n".join(parts)
            parts.append(following)
        parts[-1] = parts[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(parts).strip("\n")
    while parts[-1].endswith("\\"):
        following = lines(True)
        parts[-1] = parts[-1].removesuffix("\\")
        if following is None:
            break
        parts.append(following)
    return "\n".join(parts)


class Conversation:
    """The messages, the system text and the settings of a chat with one model."""

    def __init__(self, model: str, system: str = "", settings: dict[str, Any] | None = None) -> None:
        self.model = model
        self.system = system
        self.settings: dict[str, Any] = dict(settings or {})
        self.messages: list[dict[str, str]] = []  # without the system text

    def body(self) -> dict[str, Any]:
        """The request for the next answer; its last message is the user's."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, **self.settings, "messages": [*system, *self.messages]}

    def add(self, role: str, text: str) -> None:
        """Append a message."""
        self.messages.append({"role": role, "content": text})

    def undo(self) -> str | None:
        """Remove the last message of the user and what follows it; its text, None if there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                text = self.messages[index]["content"]
                del self.messages[index:]
                return text
        return None

    def save(self, file: Path) -> None:
        """Write the conversation as JSON. Raises `InvalidRequest`."""
        saved = {"model": self.model, "system": self.system, "settings": self.settings, "messages": self.messages}
        try:
            replace_file(file, json.dumps(saved, ensure_ascii=False, indent=1).encode("utf-8", "replace"))
        except OSError as error:
            raise InvalidRequest(f"{file}: {error.strerror}; nothing was saved") from None

    def load(self, file: Path) -> None:
        """Read a saved conversation; the model stays. Raises `InvalidRequest`, and changes nothing then."""
        try:
            with file.open("rb") as opened:
                data = opened.read(MAX_FILE + 1)
            saved = json.loads(data)
            messages = [{"role": one["role"], "content": one["content"]} for one in saved["messages"]]
            settings = {name: check_setting(name, str(value)) for name, value in saved.get("settings", {}).items()}
            system = saved.get("system", "")
            texts = [system, *(one["content"] for one in messages)]
            if not all(isinstance(text, str) for text in texts) or any(one["role"] not in ROLES for one in messages):
                raise ValueError("a message is not {role, content}")
        except OSError as error:
            raise InvalidRequest(f"{file}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRequest(f"{file} is not a conversation that /save has written ({error})") from None
        self.messages, self.settings, self.system = messages, settings, system


# ------------------------------------------------------------------ commands

HELP = {
    "help": ("", "this list"),
    "bye": ("", "end (so does Ctrl-D, or Ctrl-C twice at an empty prompt)"),
    "clear": ("", "forget the conversation"),
    "undo": ("", "remove the last message and its answer"),
    "retry": ("", "answer the last message again"),
    "system": ("[TEXT]", "set the instructions; without TEXT remove them"),
    "set": ("[NAME VALUE]", "change a setting (/set top_k 5); without VALUE reset"),
    "show": ("", "the model, the instructions and the settings"),
    "model": ("[NAME]", "go on with another model; without NAME list them"),
    "stats": ("", "show or hide token counts and speed"),
    "save": ("FILE", "write the conversation to a file"),
    "load": ("FILE", "continue a saved conversation"),
}
ALIASES = {"?": "help", "exit": "bye", "quit": "bye", "reset": "clear"}


def run_command(command: Command, chat: Conversation) -> Iterable[str]:
    """Carry out a command that concerns the conversation only; lines to print. Raises `Ended`, `InvalidRequest`."""
    name = ALIASES.get(command.name, command.name)
    match name:
        case "help":
            return help_lines()
        case "bye":
            raise Ended
        case "clear":
            chat.messages.clear()
            return ["the conversation is empty"]
        case "undo":
            return ["removed" if chat.undo() is not None else "there is no message"]
        case "system":
            chat.system = command.argument
            return ["instructions set" if chat.system else "no instructions"]
        case "set":
            return _set(command.argument, chat)
        case "show":
            return _show(chat)
        case "save" | "load" if not command.argument:
            raise InvalidRequest(f"/{name} needs the name of a file")
        case "save":
            chat.save(expand_user(command.argument))
            return [f"saved {len(chat.messages)} messages"]
        case "load":
            chat.load(expand_user(command.argument))
            return [f"loaded {len(chat.messages)} messages"]
    raise InvalidRequest(f"no command /{command.name}; /help lists them, and // at the beginning stands for a slash")


def help_lines() -> list[str]:
    """The list of commands."""
    lines = [f"/{name + ' ' + argument:<20} {text}" for name, (argument, text) in HELP.items()]
    return [*lines, f"{QUOTES} around a message of several lines; a final \\ continues a line"]


def _set(argument: str, chat: Conversation) -> list[str]:
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_")
    if not name:
        return _show(chat)
    if not value:
        chat.settings.pop(name, None)
        return [f"{name}: default"]
    chat.settings[name] = check_setting(name, value.strip())
    return [f"{name}: {chat.settings[name]}"]


def _show(chat: Conversation) -> list[str]:
    lines = [f"model: {chat.model}", f"messages: {len(chat.messages)}"]
    if chat.system:
        lines.append(f"system: {chat.system}")
    return lines + [f"{name}: {value}" for name, value in chat.settings.items()]
