"""`starling chat`: a conversation on the terminal, or with the lines of standard input."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from pipeline.config import paths
from pipeline.config.load import load
from pipeline.errors import InvalidRequest, ModelNotFound, StarlingError
from pipeline.runtime.process import EXIT_USAGE
from starling.cli import completion, terminal
from starling.cli.conversation import (
    ALIASES,
    HELP,
    Command,
    Conversation,
    Discarded,
    Ended,
    Message,
    read_input,
    run_command,
)
from starling.cli.generation_options import (
    CODES,
    Choice,
    choose_key,
    choose_model,
    find_model,
    generation_fields,
    generation_options,
    server_for,
)
from starling.cli.run import CHAT, MAX_INPUT, on_wait, speed
from starling.client.address import ServerAddress
from starling.client.answer import Answer, get_json

HISTORY = "chat-history"  # in STARLING_HOME: the lines that were typed
HISTORY_LINES = 1000
PROMPT, CONTINUED = ">>> ", "... "


@click.command(epilog=CODES)
@click.argument("model", required=False, shell_complete=completion.model_names)
@generation_options
@click.option("--stats", is_flag=True, help="Print token counts and speed after each answer.")
@click.option("--no-history", is_flag=True, help="Neither read nor write STARLING_HOME/chat-history.")
def chat(model: str | None, stats: bool, no_history: bool, **options: Any) -> int:
    """Converse with MODEL.

    MODEL is a configured model or a GGUF file; default: the first configured one. Ctrl-C stops an answer or discards
    what is being typed; at an empty prompt a second one ends, as Ctrl-D does. /help lists the commands. If standard
    input is not a terminal, each of its lines is a message. If no server of this home runs, one is started for the
    command and ends with it.
    """
    config = load()
    name = model or config.models[0].name
    choice = Choice(name, {}) if options["url"] else choose_model(config, name)
    name = choice.name
    key = choose_key(config, options["key"], options["url"])
    history = None if no_history else paths.home() / HISTORY
    try:
        with server_for(config, choice, options["url"], options["cacert"]) as address:
            if not find_model(address, choice, key).get("chat", True):
                raise InvalidRequest(f"{name} has no chat template; `starling run {name} PROMPT` continues a text")
            conversation = Conversation(name, options["system"] or "", generation_fields(options))
            loop = _Loop(address, key, conversation, stats)
            if not sys.stdin.isatty() or not sys.stdout.isatty():
                return loop.converse(_piped_line, is_interactive=False)
            terminal.note(f"{name} at {address}; /help lists the commands, Ctrl-D ends")
            return loop.converse(_Editor(history).line)
    except InvalidRequest as error:
        terminal.complain(error.message)
        return EXIT_USAGE


def _piped_line(is_continued: bool) -> str | None:
    line = sys.stdin.buffer.readline(MAX_INPUT)
    try:
        return line.decode("utf-8").removesuffix("\n") if line else None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input: byte {error.start} of a line is not UTF-8") from None


class _Loop:
    """Reads messages and commands, and prints answers."""

    def __init__(self, address: ServerAddress, key: str, conversation: Conversation, stats: bool) -> None:
        self._address = address
        self._key = key
        self._chat = conversation
        self._stats = stats

    def converse(self, lines: Callable[[bool], str | None], is_interactive: bool = True) -> int:
        """Until the end of the input or /bye. Without a terminal the first failure ends it; returns the exit code."""
        for given in read_input(lines):
            try:
                self._take(given)
            except Ended:
                break
            except StarlingError as error:
                if not is_interactive and not isinstance(error, InvalidRequest):
                    raise
                terminal.complain(error.message)
                if not is_interactive:
                    return EXIT_USAGE
            except KeyboardInterrupt:
                if not is_interactive:
                    raise
                terminal.note("stopped")
        return 0

    def _take(self, given: Message | Command) -> None:
        if isinstance(given, Message):
            self._answer(given.text)
            return
        match ALIASES.get(given.name, given.name):
            case "retry":
                text = self._chat.undo()
                if text is None:
                    raise InvalidRequest("there is no message to answer again")
                self._answer(text)
            case "model":
                _print(self._change_model(given.argument))
            case "stats":
                self._stats = not self._stats
                _print([f"stats: {'on' if self._stats else 'off'}"])
            case _:
                _print(run_command(given, self._chat))

    def _answer(self, text: str) -> None:
        """Send the conversation with `text`. A message that is refused, or gets no text, is not part of it."""
        self._chat.add("user", text)
        answer = Answer(self._address, CHAT, self._chat.body(), self._key, on_wait)
        try:
            with terminal.AnswerPrinter() as printer:
                for piece in answer.pieces():
                    printer.write(piece)
        finally:
            if answer.text or answer.finish_reason:
                self._chat.add("assistant", answer.text)
            else:
                self._chat.undo()
        if self._stats:
            terminal.note(speed(answer))

    def _change_model(self, name: str) -> Iterable[str]:
        served = get_json(self._address, "/v1/models", self._key)["data"]
        if not name:
            return [f"{'*' if one['id'] == self._chat.model else ' '} {one['id']}" for one in served]
        found = next((one for one in served if one["id"] == name), None)
        if found is None:
            raise ModelNotFound(f"the server has no model {name!r}; /model lists them")
        if not found.get("chat", True):
            raise InvalidRequest(f"{name} has no chat template")
        self._chat.model = name
        return [f"model: {name}"]


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(terminal.visible(line))


class _Editor:
    """Lines from the terminal, with editing, completion of commands and a history across sessions."""

    def __init__(self, history: Path | None) -> None:
        self._history = history
        self._readline: Any = None
        self._is_ending = False  # the next Ctrl-C at an empty prompt ends
        try:
            import readline  # from here on `input` edits lines
        except ImportError:  # an interpreter that was built without it
            return
        self._readline = readline
        readline.set_completer(complete)
        readline.set_completer_delims(" ")
        readline.parse_and_bind("tab: complete")
        readline.set_history_length(HISTORY_LINES)
        if history is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(history)

    def _keep(self, lines: int) -> None:
        """Append the last `lines` of the history to its file: a closed terminal, which is a SIGHUP, costs none."""
        if not lines or self._history is None:
            return
        with contextlib.suppress(OSError):
            # What was typed is for its author alone: the file exists with mode 0600 before anything is in it.
            os.close(os.open(self._history, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if hasattr(self._readline, "append_history_file"):
                self._readline.append_history_file(lines, self._history)
            else:  # libedit
                self._readline.write_history_file(self._history)

    def line(self, is_continued: bool) -> str | None:
        """The next line; None at Ctrl-D, or at the second Ctrl-C in a row at an empty prompt.

        Another Ctrl-C discards what was typed.
        """
        while True:
            before = self._length()
            try:
                line = input(CONTINUED if is_continued else PROMPT)
                line.encode("utf-8")  # in some locales bytes that are not UTF-8 come as surrogates
                self._keep(self._length() - before)
                self._is_ending = False
                return line
            except UnicodeError:
                terminal.note("that line is not UTF-8 and was discarded; type it again")
            except EOFError:
                click.echo()
                return None
            except KeyboardInterrupt:
                is_empty = not is_continued and not self._typed()
                if is_empty and self._is_ending:
                    click.echo()
                    return None
                self._is_ending = is_empty
                click.echo(f"\n({'Ctrl-C again, ' if is_empty else ''}Ctrl-D or /bye ends)")
                if is_continued:
                    raise Discarded from None

    def _typed(self) -> str:
        """What was typed before Ctrl-C; "" where that is not known."""
        return self._readline.get_line_buffer() if self._readline is not None else ""

    def _length(self) -> int:
        return self._readline.get_current_history_length() if self._readline is not None else 0


def complete(text: str, state: int) -> str | None:
    """readline's completer: the commands that begin with `text`."""
    found = [f"/{name}" for name in HELP if f"/{name}".startswith(text)] if text.startswith("/") else []
    return f"{found[state]} " if state < len(found) else None
