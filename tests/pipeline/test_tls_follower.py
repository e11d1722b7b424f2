"""Following a certificate's files, with a clock of the test."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from pipeline.config.schema import Config, ServerConfig
from pipeline.errors import ConfigError
from pipeline.supervise import listen_fd
from pipeline.tls import follower as following
from pipeline.tls.certificate import Certificate, CertificateFiles, Contents
from pipeline.tls.follower import CHECK_S, CertificateFollower
from pipeline.tls.kept import KeptCertificate
from tests.tls_files import DATA, place


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Followed:
    """A follower that looks when the test says so."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = Clock()
        self.published: list[bytes] = []
        files = CertificateFiles(*map(str, place(directory, "one")))
        self.follower = CertificateFollower(files, self.published.append, self.clock)

    async def look(self) -> None:
        self.clock.now += CHECK_S
        self.follower.tick()
        while (task := self.follower._task) is not None:
            await task

    @property
    def name(self) -> str:
        leaf = self.follower.certificate.leaf
        return next(name for name in ("one", "two", "expired") if (DATA / f"{name}.pem").read_bytes() == leaf)


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


async def test_new_files_are_taken_when_they_have_stood_for_a_look(followed: Followed) -> None:
    place(followed.directory, "two")
    await followed.look()
    assert followed.name == "one"
    await followed.look()
    assert followed.name == "two"
    one, two = ((DATA / f"{name}.pem").read_bytes() for name in ("one", "two"))
    assert followed.published == [one, two + one]
    await followed.look()
    assert len(followed.published) == 2


async def test_a_request_takes_them_at_the_next_look(followed: Followed) -> None:
    place(followed.directory, "two")
    followed.follower.look_soon()
    followed.follower.tick()
    while (task := followed.follower._task) is not None:
        await task
    assert followed.name == "two"


async def test_a_request_at_the_end_of_a_look_has_a_look_of_its_own(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, may_end, read = threading.Event(), threading.Event(), followed.follower._read_changed

    def late() -> Certificate | None:
        found = read()
        looked.set()
        assert may_end.wait(60)
        return found

    monkeypatch.setattr(followed.follower, "_read_changed", late)
    followed.clock.now += CHECK_S
    followed.follower.tick()
    while not looked.is_set():
        await asyncio.sleep(0)
    place(followed.directory, "two")
    followed.follower.look_soon()
    may_end.set()
    for _ in range(2):
        while (task := followed.follower._task) is not None:
            await task
        followed.follower.tick()
    assert followed.name == "two"


@pytest.mark.parametrize("fault", ["mismatch", "garbage", "missing", "mode", "expired"])
async def test_a_broken_certificate_changes_nothing_and_is_logged_once(
    followed: Followed, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "starling.tls")
    cert, key = followed.directory / "server.pem", followed.directory / "server.key"
    match fault:
        case "mismatch":
            cert.write_bytes((DATA / "two.pem").read_bytes())
        case "garbage":
            cert.write_bytes(b"garbage")
        case "missing":
            key.unlink()
        case "mode":
            place(followed.directory, "two")
            key.chmod(0o644)
        case "expired":
            place(followed.directory, "expired")
    for _ in range(4):
        await followed.look()
    for _ in range(3):  # the same again, as from a job that runs every minute
        cert.write_bytes(cert.read_bytes())
        await followed.look()
        await followed.look()
    assert followed.name == "one"
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert str(key if fault in ("mismatch", "missing", "mode") else cert) in vars(caplog.records[0])["reason"]
    place(followed.directory, "two")
    for _ in range(2):
        await followed.look()
    assert followed.name == "two"


async def test_one_look_at_a_time(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(following, "_state", lambda files: looks.append(files) or ())
    followed.clock.now += CHECK_S
    followed.follower.tick()
    task = followed.follower._task
    followed.clock.now += 10 * CHECK_S
    followed.follower.tick()
    assert followed.follower._task is task is not None
    await asyncio.gather(task)
    assert len(looks) == 1


def test_a_successor_keeps_the_certificate_of_files_that_are_broken_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(server=ServerConfig(tls_cert="/c", tls_key="/k"))
    monkeypatch.setenv(listen_fd.TLS_VARIABLE, "")  # and so removed at the end
    fd = listen_fd.keep_certificate(config)
    try:
        files = CertificateFiles(*map(str, place(tmp_path, "one")))

        def successor() -> CertificateFollower:
            monkeypatch.setenv(listen_fd.TLS_VARIABLE, str(fd))
            return CertificateFollower(files)

        assert fd in listen_fd.inherited_fds()
        successor()
        place(tmp_path, "two")
        successor()
        for _ in range(2):
            Path(files.cert).write_bytes(b"garbage")
            assert successor().certificate.leaf == (DATA / "two.pem").read_bytes()
        assert caplog.text.count("the certificate in use stays") == 2
        os.ftruncate(fd, 10)  # as if the gateway had been killed while it wrote
        with pytest.raises(ConfigError, match="valid certificate"):
            successor()
        assert listen_fd.TLS_VARIABLE not in os.environ
        assert KeptCertificate().read() is None
        assert "PRIVATE" not in repr(Contents(b"", b"PRIVATE KEY"))
    finally:
        os.close(fd)
    assert listen_fd.keep_certificate(Config()) == -1
