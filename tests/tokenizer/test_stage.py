"""The tokenizer stage: a vocabulary that is built on a thread of its own, however fast that thread is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config import paths
from pipeline.models import store, versions
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from shm.checkpoint import load_index, write_index
from stages.tokenizer import opened_models
from stages.tokenizer.opened_models import ModelSource
from stages.tokenizer.stage import MAX_LENGTH_PER_ITERATION, TokenizerStage
from tests.kv.process import MODEL, load_config
from tests.tokenizer.process import configure, write_model

NEW = f"{MODEL}@1"


class ThreadThatEndsInStart(threading.Thread):
    """A thread that is done before its starter goes on, as one may be whose starter loses its core."""

    def start(self) -> None:
        super().start()
        self.join()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenizerStage]:
    """A stage with `NEW`, a version that is being loaded; its vocabulary is not built yet."""
    configure(tmp_path, [MODEL])
    write_model(tmp_path)
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    config = load_config(tmp_path)
    index = store.find_index(config.models[0], paths.models_dir())
    assert index is not None
    known = versions.initial(config)
    new = ModelVersion(name=MODEL, serial=1, settings=config.models[0], digest=index.stem, state="loading")
    table = msgspec.structs.replace(known, versions=(*known.versions, new), serial=1)
    path = tmp_path / "run" / versions.TABLE_FILE
    path.parent.mkdir(mode=0o700)
    path.write_bytes(msgspec.json.encode(table))
    stage = TokenizerStage(config)
    yield stage
    stage.loop.close()
    opened_models.close_except(set())


@pytest.fixture
def sent(stage: TokenizerStage, monkeypatch: pytest.MonkeyPatch) -> list[m.Frame]:
    """The replies of `stage`."""
    frames: list[m.Frame] = []
    monkeypatch.setattr(stage.hub, "send", lambda peer, frame: frames.append(frame))
    return frames


def describe(stage: TokenizerStage, *keys: str) -> None:
    for key in keys:
        stage._on_frame(key.encode(), m.Describe(key, NEW))


def test_a_vocabulary_that_is_built_at_once_is_described(
    stage: TokenizerStage, sent: list[m.Frame], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "Thread", ThreadThatEndsInStart)
    describe(stage, "first", "second")
    stage._on_done()
    assert all(isinstance(frame, m.Described) for frame in sent)
    assert sorted(frame.id for frame in sent if isinstance(frame, m.Described)) == ["first", "second"]


def test_a_version_of_an_index_that_was_made_again_has_its_description(
    stage: TokenizerStage, sent: list[m.Frame], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The version that is loaded already keeps its own."""
    monkeypatch.setattr(threading, "Thread", ThreadThatEndsInStart)
    (path,) = (tmp_path / "models").glob("*.idx")
    stage._on_frame(b"gateway", m.Describe("before", MODEL))
    index = load_index(path)
    write_index(path, msgspec.structs.replace(index, hyper=msgspec.structs.replace(index.hyper, kv_revision=1)))
    stage._on_frame(b"gateway", m.Describe("old", MODEL))
    describe(stage, "new")
    stage._on_done()
    found = {frame.id: (frame.model, frame.kv_revision) for frame in sent if isinstance(frame, m.Described)}
    assert found == {"before": (MODEL, 0), "old": (MODEL, 0), "new": (NEW, 1)}


def test_an_index_that_is_gone_takes_no_vocabulary_with_it(tmp_path: Path, stage: TokenizerStage) -> None:
    (path,) = (tmp_path / "models").glob("*.idx")
    source = ModelSource(path)
    opened = opened_models.open_model(source)
    path.unlink()
    assert opened_models.is_open(source) and opened_models.open_model(source) is opened


def test_a_vocabulary_that_a_thread_adds_meanwhile_ends_no_unload(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[Any, object] = {}

    class PathSeenByAThread:
        """A path that is asked for its name, while a thread has built another vocabulary."""

        def __init__(self, name: str) -> None:
            self.name = name

        @property
        def stem(self) -> str:
            opened.setdefault(ModelSource(Path(f"other-{self.name}.idx")), object())
            return self.name

    for name in ("kept", "removed"):
        path: Any = PathSeenByAThread(name)
        opened[ModelSource(path)] = object()
    monkeypatch.setattr(opened_models, "_opened", opened)
    opened_models.close_except({"kept"})
    assert [source.index_path.name for source in opened] == ["kept", "other-kept.idx", "other-removed.idx"]


def test_everyone_who_waits_gets_the_failure_and_the_next_request_tries_again(
    stage: TokenizerStage, sent: list[m.Frame], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(threading, "Thread", ThreadThatEndsInStart)
    (index,) = (tmp_path / "models").glob("*.idx")
    whole = index.read_bytes()
    index.write_bytes(whole[: len(whole) // 2])
    describe(stage, "first", "second")
    stage._on_done()
    failed = [frame for frame in sent if isinstance(frame, m.TokenizerFailed)]
    assert [frame.id for frame in failed] == ["first", "second"] == [frame.id for frame in sent]  # type: ignore[attr-defined]
    assert all(str(index) in frame.message for frame in failed)
    index.write_bytes(whole)
    describe(stage, "third")
    stage._on_done()
    assert isinstance(sent[-1], m.Described)


def test_offsets_of_a_text_count_as_much_as_its_tokens(stage: TokenizerStage, sent: list[m.Frame]) -> None:
    """What the main thread does between two looks at its sockets stays short."""
    text = "a " * (MAX_LENGTH_PER_ITERATION // 3)
    stage._on_frame(b"gateway", m.Encode("both", MODEL, text, offsets=True))
    assert stage.encode_queue.is_busy and not sent
    stage._on_frame(b"gateway", m.Encode("tokens", MODEL, text))
    assert [frame.id for frame in sent] == ["tokens"]  # type: ignore[attr-defined]


def test_a_text_that_is_cancelled_leaves_the_queue(stage: TokenizerStage, sent: list[m.Frame]) -> None:
    text = "a " * MAX_LENGTH_PER_ITERATION
    for peer, name in ((b"gateway", "q1"), (b"other", "q1"), (b"gateway", "q2")):
        stage._on_frame(peer, m.Encode(name, MODEL, text))
    stage._on_frame(b"gateway", m.CancelText("q1"))
    assert sorted((job.client, job.name) for job in stage.encode_queue._unfinished) == [
        (b"gateway", "q2"),
        (b"other", "q1"),
    ]
    stage._on_frame(b"other", m.CancelText("q1"))
    assert stage.loop.busy
    stage._on_frame(b"gateway", m.CancelText("q2"))
    assert not stage.loop.busy and not sent
