"""The file of a version's vocabulary: there while the version is loaded, and no longer."""

from __future__ import annotations

import socket
from pathlib import Path

from pipeline.config.load import resolve
from pipeline.ipc.poll_loop import PollLoop
from pipeline.protocol.messages import Constraint, ModelVocabulary
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import helper_main
from stages.scheduler.constraints.constraints import Constraints
from stages.scheduler.constraints.helper_processes import ConstraintHelpers
from stages.scheduler.constraints.mask_writer import MaskWriter
from stages.scheduler.core.worker_link import WorkerLink

FRAME = ModelVocabulary("m@2", b"ab", b"\1\0\0\0\2\0\0\0", b"", (0,))


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
    writer = MaskWriter(lambda function: None, 4, 4)  # type: ignore[arg-type,return-value]
    writer.handle(f.Vocabulary("m@2", str(tmp_path / "gone.msgpack")))
    assert not writer.answers


def test_a_helper_that_is_late_does_not_miss_the_rows_of_an_unloaded_version(tmp_path: Path) -> None:
    """Nor those that are removed while it opens them."""
    writer = MaskWriter(lambda function: None, 4, 4)  # type: ignore[arg-type,return-value]
    (tmp_path / "cut").write_bytes(b"")
    for name in ("gone", "cut"):
        writer.handle(f.Rows("m@2", str(tmp_path / name)))
    assert not writer.answers


def test_a_constraint_of_an_unloaded_version_ends_no_trial_process(tmp_path: Path) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        missing = f.Vocabulary("m@2", str(tmp_path / "gone.msgpack"))
        for number in (1, 2):
            constraint = Constraint("regex", "a", "regex")
            for packet in f.packets([missing, f.Vet(number, "m@2", constraint)]):
                ours.send(packet)
        ours.shutdown(socket.SHUT_WR)
        helper_main.serve_vet(its.fileno())
        its.close()
        answers = []
        while packet := ours.recv(1 << 16):
            answers += f.decode_answers(packet)
    why = "the model has been unloaded"
    assert answers == [f.Begun(1), f.Vetted(1, why), f.Begun(2), f.Vetted(2, why)]
