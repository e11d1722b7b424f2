"""The thread of a model's sessions executes frames in their order, also while no version of the model is loaded."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.protocol import messages as m
from stages.kv.sessions.model_sessions import ModelSessions
from stages.kv.sessions.session_bounds import SessionBounds
from stages.kv.sessions.session_thread import SessionThread
from stages.kv.stage import KvStage
from tests.kv.test_sessions import ME, ROOTS, Time, raw
from tests.kv.world import PAGE_TOKENS

TOKENIZER = "ab" * 32


def test_a_turn_is_aborted_though_its_model_has_just_been_unloaded(tmp_path: Path) -> None:
    """The gateway ends the requests of a version and drops it: its frame may be read when the version is gone."""
    sessions = ModelSessions(tmp_path, "m", Time())
    thread = SessionThread(sessions)
    thread.open(TOKENIZER, ROOTS, PAGE_TOKENS, SessionBounds(10, 1000))
    thread.handle(ME, m.SessionBegin(1, "m", "t", "s", create=True, ttl_s=100), TOKENIZER)
    thread.handle(ME, m.SessionCommit(2, "m", "t", "s", 1, 0, raw(1, 2)), TOKENIZER)
    thread.handle(ME, m.SessionBegin(3, "m", "t", "s"), TOKENIZER)
    thread.handle(ME, m.SessionAbort("m", "t", "s", 2), "")
    thread.handle(ME, m.SessionBegin(4, "m", "t", "s"), "")
    thread.close(60.0)
    replies = [result.reply for result in thread.poll()]
    assert [type(reply) for reply in replies] == [m.SessionHeld, m.SessionDone, m.SessionHeld, m.SessionRefused]
    store = sessions.store(TOKENIZER)
    assert store is not None
    (session,) = store.all()
    assert (session.turns, session.holder) == (1, b"")


def test_a_turn_begins_with_the_version_that_computes_it() -> None:
    """A reload may serve another version, of another tokenizer, when the frame is read: its ids mean something else."""
    tokenizers = {"m@2": "b" * 64, "": "c" * 64}  # "": of the version that serves
    handled: list[str] = []
    versions = SimpleNamespace(
        poll_record=lambda: None,
        open_missing=lambda now: [],
        sessions={"m": SimpleNamespace(handle=lambda peer, frame, tokenizer: handled.append(tokenizer))},
        find=lambda name, version: SimpleNamespace(pages=SimpleNamespace(tokenizer=tokenizers[version])),
    )
    stage: Any = SimpleNamespace(loop=SimpleNamespace(progress=0), versions=versions)
    KvStage._on_gateway_frame(stage, ME, m.SessionBegin(1, "m", "t", "s", create=True, version="m@2"))
    KvStage._on_gateway_frame(stage, ME, m.SessionCommit(2, "m", "t", "s", 1, 0, raw(1)))
    assert handled == ["b" * 64, "c" * 64]


def closed(thread: SessionThread, session: str = "s", tokenizer: str = "") -> object:
    """The answer to a frame that closes a session: the code of the error, or None."""
    thread.handle(ME, m.SessionClose(9, "m", "t", session), tokenizer)
    reply = answers(thread)[-1]
    assert isinstance(reply, m.SessionDone | m.SessionRefused)
    return reply.code if isinstance(reply, m.SessionRefused) else None


def answers(thread: SessionThread) -> list[m.Frame | None]:
    """The answers to all frames so far."""
    done = threading.Event()
    thread.call(lambda sessions: {}, lambda result: done.set())
    replies: list[m.Frame | None] = []
    while not done.is_set():
        for result in thread.poll():
            replies.append(result.reply)
            if result.finish is not None:
                result.finish()
    return replies[:-1]


def test_a_session_is_closed_while_no_version_is_loaded(tmp_path: Path) -> None:
    """Also by a process that has loaded none: only the files are there."""
    bounds = SessionBounds(10, 1000)
    thread = SessionThread(ModelSessions(tmp_path, "m", Time()))
    thread.open(TOKENIZER, ROOTS, PAGE_TOKENS, bounds)
    for number, name in enumerate("abc"):
        thread.handle(ME, m.SessionBegin(number, "m", "t", name, create=True, ttl_s=100), TOKENIZER)
        thread.handle(ME, m.SessionCommit(number, "m", "t", name, 1, 0, raw(*range(3 * PAGE_TOKENS))), TOKENIZER)
    assert closed(thread, "a") is None
    assert closed(thread, "a") == "NOT_FOUND"
    thread.close(60.0)
    assert len(list(tmp_path.rglob("*.session"))) == 2

    sessions = ModelSessions(tmp_path, "m", Time())
    thread = SessionThread(sessions)
    assert closed(thread, "a") == "NOT_FOUND"
    assert closed(thread, "b") is None
    assert len(list(tmp_path.rglob("*.session"))) == 1
    thread.handle(ME, m.SessionBegin(1, "m", "t", "c"), TOKENIZER)
    (refused,) = answers(thread)
    assert isinstance(refused, m.SessionRefused)
    assert refused.code == "MODEL_UNAVAILABLE"
    thread.open(TOKENIZER, ROOTS, PAGE_TOKENS, bounds)  # a version serves: the session continues, with its pages
    thread.handle(ME, m.SessionBegin(1, "m", "t", "c"), TOKENIZER)
    (held,) = answers(thread)
    assert isinstance(held, m.SessionHeld)
    store = sessions.store(TOKENIZER)
    assert store is not None
    store.check()
    (session,) = store.all()
    assert len(session.page_hashes) == 3
    thread.close(60.0)


def test_whether_a_session_exists_is_unknown_while_its_files_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = SessionThread(ModelSessions(tmp_path, "m", Time()))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "glob", failing)
        assert closed(thread) == "MODEL_UNAVAILABLE"
    assert closed(thread) == "NOT_FOUND"
    thread.close(60.0)


def failing(*_: Any) -> Any:
    raise OSError(errno.EIO, "fails")
