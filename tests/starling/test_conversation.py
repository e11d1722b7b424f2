"""What is typed into `starling chat`: messages, commands, and a conversation that is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidRequest
from starling.cli.chat import complete
from starling.cli.conversation import (
    HELP,
    Command,
    Conversation,
    Discarded,
    Ended,
    Message,
    read_input,
    run_command,
)

PLAIN = st.text(st.characters(exclude_characters='\r\n"\\/', exclude_categories=("Cs",)), min_size=1).filter(str.strip)


def typed(*lines: str) -> Callable[[bool], str | None]:
    left = list(lines)
    return lambda is_continued: left.pop(0) if left else None


@given(st.lists(PLAIN, max_size=5))
def test_each_line_is_a_message(lines: list[str]) -> None:
    assert list(read_input(typed(*lines))) == [Message(line) for line in lines]


@given(st.lists(PLAIN, min_size=1, max_size=5), st.booleans())
def test_quotes_and_backslashes_join_lines(lines: list[str], has_quotes: bool) -> None:
    whole = "\n".join(lines)
    given_lines = f'"""{whole}"""'.split("\n") if has_quotes else whole.replace("\n", "\\\n").split("\n")
    assert list(read_input(typed(*given_lines, "next"))) == [Message(whole), Message("next")]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["/set top_k  5"], [Command("set", "top_k  5")]),
        (["//etc/hosts"], [Message("/etc/hosts")]),
        (["", "  "], []),
        (['"""', "a", '"""'], [Message("a")]),
        (['"""a'], [Message("a")]),
        (["a\\"], [Message("a")]),
        (['""""""'], []),
    ],
)
def test_what_lines_mean(lines: list[str], expected: list[Message | Command]) -> None:
    assert list(read_input(typed(*lines))) == expected


def test_a_message_that_is_discarded_while_it_is_typed() -> None:
    left = ["one\\", None, "two"]

    def lines(is_continued: bool) -> str | None:
        line = left.pop(0) if left else ""
        if line is None:
            raise Discarded
        return line or None

    assert list(read_input(lines)) == [Message("two")]


def test_settings_are_checked_and_reset() -> None:
    chat = Conversation("m", system="Be brief.")
    run_command(Command("set", "temperature 0.5"), chat)
    run_command(Command("set", "max-tokens 20"), chat)
    chat.add("user", "hi")
    assert chat.body() == {
        "model": "m",
        "temperature": 0.5,
        "max_tokens": 20,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    }
    run_command(Command("set", "temperature"), chat)
    run_command(Command("system", ""), chat)
    assert chat.body() == {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
    for argument, reason in (("temperature 3", "not in the range 0<=x<=2"), ("heat 1", "no setting 'heat'")):
        with pytest.raises(InvalidRequest, match=reason):
            run_command(Command("set", argument), chat)
    assert chat.settings == {"max_tokens": 20}


def test_undo_removes_a_message_and_its_answer() -> None:
    chat = Conversation("m")
    assert chat.undo() is None
    for role in ("user", "assistant", "user", "assistant"):
        chat.add(role, f"{role}{len(chat.messages)}")
    assert chat.undo() == "user2"
    assert [message["content"] for message in chat.messages] == ["user0", "assistant1"]


def test_a_conversation_is_saved_and_continued(tmp_path: Path) -> None:
    chat = Conversation("m", "Be brief.", {"seed": 7})
    chat.add("user", "Grüße\n你好")
    list(run_command(Command("save", str(tmp_path / "c.json")), chat))
    other = Conversation("other")
    list(run_command(Command("load", str(tmp_path / "c.json")), other))
    assert other.body() == {**chat.body(), "model": "other"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"messages": [{"role": "tool", "content": ""}]}',
        '{"messages": [{"role": "user", "content": 1}]}',
        '{"messages": [], "settings": {"temperature": 9}}',
        '{"messages": [], "settings": []}',
        "[" * 100_000,
    ],
)
def test_other_files_are_refused_and_change_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)
    chat = Conversation("m")
    chat.add("user", "hi")
    with pytest.raises(InvalidRequest):
        run_command(Command("load", str(tmp_path / "c.json")), chat)
    assert chat.messages == [{"role": "user", "content": "hi"}]


def test_every_command_is_listed_and_completed() -> None:
    chat = Conversation("m")
    assert len(list(run_command(Command("help", ""), chat))) == len(HELP) + 1
    assert max(map(len, run_command(Command("help", ""), chat))) <= 80
    assert [complete("/s", state) for state in range(6)] == ["/system ", "/set ", "/show ", "/stats ", "/save ", None]
    assert complete("s", 0) is None
    with pytest.raises(Ended):
        run_command(Command("quit", ""), chat)
    with pytest.raises(InvalidRequest, match="no command /sett"):
        run_command(Command("sett", ""), chat)
