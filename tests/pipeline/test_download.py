"""A file arrives whole and unchanged, or an error says why: against a real server with real faults."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError, ModelUnavailable, ResourceError, StarlingError
from pipeline.models import download as downloads
from pipeline.models.download import no_progress
from tests.pipeline.file_server import FileServer

ROOT = Path(__file__).resolve().parents[2]
PIECE = 1 << 16
CONTENT = random.Random(1).randbytes(9 * PIECE + 17)
DIGEST = hashlib.sha256(CONTENT).hexdigest()
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PIECE_BYTES", PIECE)


@pytest.fixture
def files() -> Iterator[FileServer]:
    with FileServer(CONTENT) as server:
        yield server


async def no_pause(seconds: float) -> None:
    assert seconds <= downloads.MAX_WAIT_S


def fetch(files: FileServer, part: Path, **options: Any) -> str:
    return downloads.download(files.url, part, options.pop("progress", no_progress), "m", pause=no_pause, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_pieces_make_the_file(tmp_path: Path, files: FileServer) -> None:
    seen: list[tuple[int, int]] = []
    digest = fetch(files, tmp_path / "p", progress=lambda what, done, total: seen.append((done, total)))
    assert digest == DIGEST
    assert (tmp_path / "p").read_bytes() == CONTENT
    assert names(tmp_path) == ["p", "p.json"]
    wanted = [f"bytes={at}-{min(at + PIECE, len(CONTENT)) - 1}" for at in range(0, len(CONTENT), PIECE)]
    assert sorted(filter(None, files.ranges)) == sorted(["bytes=0-0", *wanted])
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)


def test_several_connections_receive_at_the_same_time(tmp_path: Path, files: FileServer) -> None:
    """The server holds every piece back until four are requested."""
    barrier = threading.Barrier(4, timeout=60)

    def before(server: FileServer, begin: int) -> None:
        if 0 < begin <= 4 * PIECE:
            barrier.wait()

    files.before = before
    files.content = CONTENT[: 5 * PIECE]
    assert fetch(files, tmp_path / "p") == hashlib.sha256(files.content).hexdigest()
    assert not barrier.broken


@pytest.mark.parametrize(("cuts", "cut_at"), [(1, 0), (3, 1000), (7, PIECE - 1)])
def test_a_server_that_drops_connections(tmp_path: Path, files: FileServer, cuts: int, cut_at: int) -> None:
    files.cuts, files.cut_at = cuts, cut_at
    assert fetch(files, tmp_path / "p") == DIGEST
    if cut_at:  # a piece goes on where it was
        assert any(int(one.removeprefix("bytes=").partition("-")[0]) % PIECE for one in files.ranges if one)


def test_a_server_that_is_overloaded_for_a_while(tmp_path: Path, files: FileServer) -> None:
    files.failures = downloads.ATTEMPTS - 1
    assert fetch(files, tmp_path / "p") == DIGEST


def test_what_was_received_is_not_fetched_again(tmp_path: Path, files: FileServer) -> None:
    def before(server: FileServer, begin: int) -> None:
        if begin >= 6 * PIECE:
            server.status = 503

    files.before = before
    with pytest.raises(ModelUnavailable, match="answers 503.*the received part is kept"):
        fetch(files, tmp_path / "p", connections=1)
    files.before, files.status, files.ranges = (lambda server, begin: None), 0, []
    assert fetch(files, tmp_path / "p") == DIGEST
    assert sorted(filter(None, files.ranges)) == [
        "bytes=0-0",
        *(f"bytes={n * PIECE}-{min((n + 1) * PIECE, len(CONTENT)) - 1}" for n in range(7, 10)),
    ]


@pytest.mark.parametrize("mode", [0o600, 0o444])
def test_a_complete_file_that_was_not_placed_is_not_fetched_again(tmp_path: Path, files: FileServer, mode: int) -> None:
    part = tmp_path / "p"
    assert fetch(files, part) == DIGEST
    part.chmod(mode)  # the caller was killed before it could move the file
    files.ranges.clear()
    assert fetch(files, part) == DIGEST
    assert (files.ranges, part.stat().st_mode & 0o777) == (["bytes=0-0"], 0o600)
    part.rename(tmp_path / "placed")
    downloads.discard(part)
    assert names(tmp_path) == ["placed"]


def test_a_download_survives_sigkill(tmp_path: Path, files: FileServer) -> None:
    """The process is killed while the server holds the last pieces back."""
    reached = threading.Event()
    hold = threading.Event()

    def before(server: FileServer, begin: int) -> None:
        if begin >= 6 * PIECE:
            reached.set()
            hold.wait(60)

    files.before = before
    code = (
        "import sys; from pathlib import Path; from pipeline.models import download as d\n"
        f"d.PIECE_BYTES = {PIECE}\n"
        "d.download(sys.argv[1], Path(sys.argv[2]), d.no_progress, 'm', connections=1)"
    )
    command = [sys.executable, "-c", code, files.url, str(tmp_path / "p")]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    files.before, files.ranges = (lambda server, begin: None), []
    hold.set()
    assert fetch(files, tmp_path / "p") == DIGEST
    assert len(files.ranges) == 1 + 4


@pytest.mark.parametrize("has_tag", [True, False])
def test_a_file_that_changes_midway_arrives_as_one_version(tmp_path: Path, files: FileServer, has_tag: bool) -> None:
    """Noticed by the tag of the ranges; without one nothing is joined."""
    changed = CONTENT[::-1] + b"x"

    def before(server: FileServer, begin: int) -> None:
        if begin == 3 * PIECE:
            server.content, server.tag = changed, '"two"' if has_tag else ""

    files.before = before
    files.tag = '"one"' if has_tag else ""
    digest = fetch(files, tmp_path / "p")
    assert digest == hashlib.sha256((tmp_path / "p").read_bytes()).hexdigest()
    assert (tmp_path / "p").read_bytes() == (changed if has_tag else CONTENT)


def test_a_file_that_changed_between_two_attempts(tmp_path: Path, files: FileServer) -> None:
    files.before = lambda server, begin: setattr(server, "status", 503) if begin >= 6 * PIECE else None
    with pytest.raises(ModelUnavailable):
        fetch(files, tmp_path / "p", connections=1)
    files.before, files.status = (lambda server, begin: None), 0
    files.content, files.tag = CONTENT[::-1], '"two"'
    assert fetch(files, tmp_path / "p") == hashlib.sha256(CONTENT[::-1]).hexdigest()


def test_a_file_that_never_stays_the_same_is_given_up(tmp_path: Path, files: FileServer) -> None:
    count = 0

    def before(server: FileServer, begin: int) -> None:
        nonlocal count
        if begin:
            count += 1
            server.tag = f'"{count}"'

    files.before = before
    with pytest.raises(ModelUnavailable, match="changed 3 times while it was downloaded"):
        fetch(files, tmp_path / "p")
    assert names(tmp_path) == []


@pytest.mark.parametrize("announced", [len(CONTENT) - 5000, len(CONTENT) + 5000, len(CONTENT) + 3 * PIECE])
def test_a_server_that_lies_about_the_length(tmp_path: Path, files: FileServer, announced: int) -> None:
    """A shorter one is a prefix, which the digest tells; a longer one never ends, and is given up."""
    files.announced = announced
    if announced < len(CONTENT):
        assert fetch(files, tmp_path / "p") == hashlib.sha256(CONTENT[:announced]).hexdigest()
        return
    with pytest.raises(
        ModelUnavailable, match="shorter than was announced|connection lost|could not be downloaded"
    ) as raised:
        fetch(files, tmp_path / "p")
    assert str(raised.value).count("m: ") == 1  # the subject stands once


@pytest.mark.parametrize("tag", ["", 'W/"weak"'])
@pytest.mark.parametrize("has_ranges", [True, False])
def test_without_a_strong_tag_or_ranges_it_is_one_stream(
    tmp_path: Path, files: FileServer, tag: str, has_ranges: bool
) -> None:
    files.tag, files.has_ranges = tag, has_ranges
    files.cuts, files.cut_at = 1, 5000
    assert fetch(files, tmp_path / "p") == DIGEST
    assert (tmp_path / "p").read_bytes() == CONTENT
    assert files.ranges[1:] and not any(files.ranges[2:])


@pytest.mark.parametrize("damage", [b"", b"{", b'{"validator":"x","total":1,"piece_bytes":1,"done":[999]}'])
def test_a_damaged_state_starts_again(tmp_path: Path, files: FileServer, damage: bytes) -> None:
    (tmp_path / "p").write_bytes(b"other bytes")
    (tmp_path / "p.json").write_bytes(damage)
    assert fetch(files, tmp_path / "p") == DIGEST


@pytest.mark.parametrize(("status", "kind"), [(404, ConfigError), (403, ConfigError), (500, ModelUnavailable)])
def test_http_errors_are_reported(tmp_path: Path, files: FileServer, status: int, kind: type[Exception]) -> None:
    files.status = status
    with pytest.raises(kind, match=f"answers {status}"):
        fetch(files, tmp_path / "p")


def test_a_redirect_leads_only_where_it_may(tmp_path: Path, files: FileServer) -> None:
    with FileServer(b"secret") as inside:
        files.redirect = inside.url

        def allow(url: str) -> None:
            if not url.startswith(files.url):
                raise ConfigError(f"{url} is not allowed")

        with pytest.raises(ConfigError, match="is not allowed"):
            fetch(files, tmp_path / "p", allow=allow)
        assert inside.ranges == []
        assert fetch(files, tmp_path / "p") == hashlib.sha256(b"secret").hexdigest()
        for target, reason in (
            ("file:///etc/passwd", "not an address"),
            ("http://[x", "not an address"),
            (files.url, "redirects more than"),
        ):
            files.redirect = target
            with pytest.raises(ConfigError, match=reason):
                fetch(files, tmp_path / "q")


def test_a_signed_address_is_sent_as_it_came(tmp_path: Path) -> None:
    with FileServer(b"") as front, FileServer(CONTENT) as store:
        signed = f"{store.url}%2Fa?file=%27a%27%2C%28b%29&sig=a%2Fb"
        front.redirect = signed
        assert fetch(front, tmp_path / "p") == DIGEST
        assert store.paths == {signed.removeprefix(store.url.removesuffix("/model.gguf"))}


def test_pieces_come_from_where_a_redirect_led_until_that_address_expires(tmp_path: Path) -> None:
    with FileServer(b"") as front, FileServer(CONTENT) as old, FileServer(CONTENT) as new:
        front.redirect = old.url

        def expire(server: FileServer, begin: int) -> None:
            if begin == 4 * PIECE:
                server.status, front.redirect = 403, new.url

        old.before = expire
        assert fetch(front, tmp_path / "p", connections=1) == DIGEST
        assert len(front.ranges) == 2
        assert len(old.ranges) == 7  # the first byte, five pieces, and the refusal
        assert len(new.ranges) == 5
        new.status = 403
        front.ranges.clear()
        with pytest.raises(ConfigError, match="answers 403"):
            fetch(front, tmp_path / "q")
        assert len(front.ranges) == 1


@pytest.mark.parametrize("fault", ["no ranges", "another length", "another tag"])
def test_a_location_that_has_another_file_costs_no_piece(tmp_path: Path, fault: str) -> None:
    with FileServer(b"") as front, FileServer(CONTENT) as old, FileServer(CONTENT) as new:
        front.redirect = old.url

        def change(server: FileServer, begin: int) -> None:
            if begin == 4 * PIECE:
                front.redirect = new.url
                old.has_ranges = fault != "no ranges"
                old.announced = len(CONTENT) + 1 if fault == "another length" else 0
                old.tag = '"two"' if fault == "another tag" else old.tag

        old.before = change
        assert fetch(front, tmp_path / "p", connections=1) == DIGEST
        assert len(old.ranges) == 7  # the first byte, five pieces, and the one with the fault
        assert len(new.ranges) == 5


PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def test_the_proxy_of_all_addresses(tmp_path: Path, files: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    address = files.url.rpartition("/")[0]
    with FileServer(b"") as proxy:  # it has the file of no address
        proxy.status = 404
        monkeypatch.setenv("ALL_PROXY", proxy.url.rpartition("/")[0])
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert fetch(files, tmp_path / "direct") == DIGEST
        assert proxy.ranges == []
        monkeypatch.setenv("http_proxy", address)  # of its scheme: it comes first
        url = "http://models.invalid/m.gguf"
        assert downloads.download(url, tmp_path / "scheme", no_progress, "m", pause=no_pause) == DIGEST
        monkeypatch.delenv("http_proxy")
        for value in (address, address.removeprefix("http://")):
            monkeypatch.setenv("ALL_PROXY", value)
            assert downloads.download(url, tmp_path / "all", no_progress, "m", pause=no_pause) == DIGEST
        monkeypatch.setenv("ALL_PROXY", "socks5://user:secret@127.0.0.1:1")
        with pytest.raises(ConfigError, match="ALL_PROXY names a socks5:// proxy") as refused:
            downloads.download(url, tmp_path / "socks", no_progress, "m", pause=no_pause)
        assert "secret" not in str(refused.value)
        monkeypatch.setenv("ALL_PROXY", f"http://user:secret@{address.removeprefix('http://')}")
        with pytest.raises(ModelUnavailable, match="405|407|501") as failed:
            downloads.download("https://models.invalid/m", tmp_path / "https", no_progress, "m", pause=no_pause)
        assert "secret" not in str(failed.value)


def test_headers_are_sent_to_their_host_alone(tmp_path: Path, files: FileServer) -> None:
    with FileServer(CONTENT) as other:
        files.redirect = other.url

        def headers_of(url: str) -> dict[str, str]:
            return {"Authorization": "Bearer one"} if url == files.url else {}

        assert fetch(files, tmp_path / "p", headers_of=headers_of) == DIGEST
        assert (files.authorizations, other.authorizations) == ({"Bearer one"}, {None})


@pytest.mark.parametrize("status", [403, 404, 503])
def test_no_message_has_the_query_of_an_address(tmp_path: Path, files: FileServer, status: int) -> None:
    """It may be a signature, and an address that a redirect names is often signed."""
    with FileServer(b"x") as inside:
        files.redirect = f"{inside.url}?X-Amz-Signature=canary"
        inside.status = status
        messages = []
        for url in (files.url, f"{inside.url}?token=canary"):
            with pytest.raises(StarlingError, match=f"answers {status}") as caught:
                downloads.download(url, tmp_path / "p", no_progress, url, pause=no_pause)
            messages.append(str(caught.value))
        with pytest.raises(ConfigError, match="not an address") as failed:
            downloads.download("http://[canary", tmp_path / "p", no_progress, "model 'm'", pause=no_pause)
        assert "canary" not in "".join(messages)
        assert all(f"{inside.url}?..." in message for message in messages)
        assert "model 'm'" in str(failed.value)


def test_a_lack_of_space_is_known_before(tmp_path: Path, files: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1000, 0, 1000))
    with pytest.raises(ResourceError, match=f"needs {len(CONTENT):,} bytes in .* which has 1,000 free"):
        fetch(files, tmp_path / "p")
    assert files.ranges == ["bytes=0-0"]


def test_ctrl_c_keeps_what_was_received(tmp_path: Path, files: FileServer) -> None:
    def before(server: FileServer, begin: int) -> None:
        if begin == 5 * PIECE:
            os.kill(os.getpid(), signal.SIGINT)

    files.before = before
    with contextlib.suppress(KeyboardInterrupt):
        fetch(files, tmp_path / "p", connections=1)
    files.before, files.ranges = (lambda server, begin: None), []
    assert fetch(files, tmp_path / "p") == DIGEST
    assert len(files.ranges) < 8
