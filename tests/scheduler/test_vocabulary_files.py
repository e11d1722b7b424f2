"""The file of a version's vocabulary: there while the version is loaded, and no longer."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.config.load import resolve
from pipeline.files import temporary_path
from pipeline.ipc.poll_loop import PollLoop
from pipeline.protocol.messages import Constraint, ModelVocabulary
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import mask_writer
from stages.scheduler.constraints.constraints import Constraints
from stages.scheduler.constraints.helper_processes import RETRY_S, ConstraintHelpers
from stages.scheduler.constraints.mask_writer import MaskWriter
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.policy.admission import Refusal
from stages.scheduler.stage import SchedulerStage

from .constraint_helpers import vetted
from .peers import submission
from .vocabularies import vocabulary

FRAME = ModelVocabulary("m@2", b"ab", b"\1\0\0\0\2\0\0\0", b"", (0,))


class StoppedLoop:
    """A stage's loop whose clock the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    @property
    def clock(self) -> Callable[[], float]:
        return lambda: self.now

    def add_fd(self, fd: int, callback: Callable[[], None]) -> None:
        """No helper is started."""

    def remove_fd(self, fd: int) -> None:
        """Likewise."""


class Site:
    """A version whose vocabulary's file has `path`, in a directory that may be missing."""

    def __init__(self, home: Path) -> None:
        self.loop = StoppedLoop()
        self.helpers = ConstraintHelpers(resolve({}, {}), self.loop, list)
        self.constraints = Constraints("m@2", WorkerLink(0.0), self.helpers.vetting)
        self.path = home / "run" / "vocabulary-m@2.msgpack"

    def add(self, frame: ModelVocabulary = FRAME) -> None:
        self.helpers.add_vocabulary(frame, self.path, self.constraints)

    def tick(self, seconds: float) -> None:
        self.loop.now += seconds
        self.helpers.tick(self.loop.now)

    def hold(self) -> Refusal | bool:
        """The answer to a request with a constraint."""
        frame = submission("s", [1], 5, constraint=Constraint("regex", "a", "regex"))
        held = self.constraints.hold(b"g", frame, self.loop.now, lambda *_: None, lambda *_: None)
        self.constraints.cancel_held("s")
        self.helpers.vetting.frames.clear()  # no process is started for it
        return held


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.helpers.close()


def test_a_vocabulary_is_stored_as_soon_as_the_disk_works_again(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Its gateway has sent it, and does not send it again."""
    site.add()
    for _ in range(5):
        site.tick(RETRY_S)
        refusal = site.hold()
        assert isinstance(refusal, Refusal)
        assert (refusal.code, refusal.retry_after_s) == ("MODEL_UNAVAILABLE", RETRY_S)
    site.path.parent.mkdir()
    site.tick(RETRY_S / 2)
    assert not site.path.exists(), "attempts are rare: a disk may take long to fail"
    site.tick(RETRY_S / 2)
    assert mask_writer.read_vocabulary(str(site.path)) == f.VocabularyFile(*content(FRAME))
    assert site.hold() is True
    site.path.unlink()
    site.tick(RETRY_S)
    assert not site.path.exists(), "it is written once"
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert logged == ["a state file failed", "state files work again"]


def test_an_unloaded_version_is_not_stored_later(site: Site) -> None:
    site.add()
    site.helpers.forget("m@2")
    site.path.parent.mkdir()
    site.tick(RETRY_S)
    assert not site.path.exists()


def test_a_failed_vocabulary_keeps_no_other_version_waiting(site: Site, tmp_path: Path) -> None:
    site.add()
    other = Constraints("m", WorkerLink(0.0), site.helpers.vetting)
    frame = msgspec.structs.replace(FRAME, model="m")
    site.helpers.add_vocabulary(frame, tmp_path / "vocabulary-m.msgpack", other)
    assert (tmp_path / "vocabulary-m.msgpack").exists()
    site.path.parent.mkdir()
    site.tick(RETRY_S)
    assert site.path.exists()


def test_a_reader_of_the_file_sees_the_old_vocabulary_or_the_new_one(site: Site) -> None:
    site.path.parent.mkdir()
    site.add()
    old = site.path.read_bytes()
    with site.path.open("rb") as reader:
        site.add(msgspec.structs.replace(FRAME, pieces=b"xy" * 1000))
        assert reader.read() == old
    assert mask_writer.read_vocabulary(str(site.path)).pieces == b"xy" * 1000
    assert list(site.path.parent.iterdir()) == [site.path]


def test_a_damaged_file_is_replaced(site: Site) -> None:
    site.path.parent.mkdir()
    site.path.write_bytes(b"half")
    site.add()
    assert mask_writer.read_vocabulary(str(site.path)).pieces == FRAME.pieces


def content(frame: ModelVocabulary) -> tuple[bytes, bytes, bytes, tuple[int, ...]]:
    """What the file has of a frame."""
    return frame.pieces, frame.piece_ends, frame.control, frame.eos_ids


def test_an_unloaded_version_leaves_no_file(tmp_path: Path) -> None:
    """Each reload has one of megabytes."""
    (tmp_path / "run").mkdir(mode=0o700)
    config = resolve({"server": {"run_dir": str(tmp_path / "run"), "arena_dir": str(tmp_path / "arenas")}}, {})
    loop = PollLoop("scheduler", config)
    try:
        helpers = ConstraintHelpers(config, loop, list)
        path = tmp_path / "vocabulary-m@2.msgpack"
        helpers.add_vocabulary(FRAME, path, Constraints("m@2", WorkerLink(0.0), helpers.vetting))
        assert path.exists()
        helpers.forget("m@2")
        assert not path.exists()
        helpers.forget("m@2")
        helpers.close()
    finally:
        loop.close()


def test_a_helper_that_is_late_does_not_miss_the_file_of_an_unloaded_version(tmp_path: Path) -> None:
    writer = MaskWriter(lambda sequence, function: None, 4, 4)  # type: ignore[arg-type,return-value]
    writer.handle(f.Vocabulary("m@2", str(tmp_path / "gone.msgpack")))
    assert not writer.answers


def test_a_helper_that_is_late_does_not_miss_the_rows_of_an_unloaded_version(tmp_path: Path) -> None:
    """Nor those that are removed while it opens them."""
    writer = MaskWriter(lambda sequence, function: None, 4, 4)  # type: ignore[arg-type,return-value]
    (tmp_path / "cut").write_bytes(b"")
    for name in ("gone", "cut"):
        writer.handle(f.Rows("m@2", str(tmp_path / name)))
    assert not writer.answers


def test_a_constraint_of_an_unloaded_version_ends_no_trial_process(tmp_path: Path) -> None:
    missing = f.Vocabulary("m@2", str(tmp_path / "gone.msgpack"))
    constraint = Constraint("regex", "a", "regex")
    answers = vetted([missing, f.Vet(1, "m@2", constraint), missing, f.Vet(2, "m@2", constraint)])
    why = "the model has been unloaded"
    assert answers == [f.Begun(1), f.Vetted(1, why), f.Begun(2), f.Vetted(2, why)]


def test_a_model_without_an_end_token_ends_no_trial_process(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.msgpack"
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(vocabulary(), eos_ids=())))
    constraint = Constraint("regex", "a", "regex")
    answers = vetted([f.Vocabulary("m", str(path)), f.Vet(1, "m", constraint), f.Vet(2, "m", constraint)])
    assert [answer.id for answer in answers if isinstance(answer, f.Begun)] == [1, 2]
    refusals = [answer.error for answer in answers if isinstance(answer, f.Vetted)]
    assert len(refusals) == 2 and all("no end token" in refusal for refusal in refusals)


def test_the_stage_stores_a_vocabulary_at_a_tick_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the paths of sockets are short
        server = {name: f"{folder}/{name}" for name in ("run_dir", "arena_dir", "state_dir")}
        run = Path(server["run_dir"])
        run.mkdir(mode=0o700)
        left = temporary_path(run / "vocabulary-gone@1.msgpack")
        left.write_bytes(b"part")
        stage = SchedulerStage(resolve({"models": [{"name": "m", "path": "/model.gguf"}], "server": server}, {}))
        try:
            assert not left.exists(), "of a process that was killed while it wrote"
            path = run / "vocabulary-m.msgpack"
            temporary_path(path).mkdir()  # so that it cannot be written
            stage._on_gateway(b"g", msgspec.structs.replace(FRAME, model="m"))
            assert not path.exists()
            temporary_path(path).rmdir()
            monkeypatch.setattr(stage, "_clock", lambda: stage.loop.clock() + RETRY_S)
            stage._tick()
            assert mask_writer.read_vocabulary(str(path)).pieces == FRAME.pieces
            assert stage.runners["m"].engine.constraints._vocabulary == str(path)
        finally:
            stage.loop.quit(0)
            stage.run()
