"""`starling support-bundle`: what is in it, what is not, and that it is written when nothing else works."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import tarfile
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ResourceError
from starling.cli import cli
from starling.support.redaction import MASK, Redaction

KEY = "a-long-key-of-team-a"
TEXTS = st.text(max_size=40)


def bundle(home: Path, monkeypatch: pytest.MonkeyPatch, config: str, *arguments: str) -> dict[str, str]:
    """Run the command; the contents of its file by name."""
    (home / "starling.yaml").write_text(config)
    monkeypatch.setenv("STARLING_HOME", str(home))
    monkeypatch.setenv("STARLING_CONFIG", str(home / "starling.yaml"))
    path = home / "bundle.tar.gz"
    done = CliRunner().invoke(cli, ["support-bundle", "--output", str(path), *arguments])
    assert done.exit_code == 0, done.output
    assert path.stat().st_mode & 0o777 == 0o600
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read().decode()
    return found


def test_everything_is_in_it_but_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"auth": {"api_keys": [{"key": KEY, "tenant": "acme-research"}]}}
    log = tmp_path / "logs" / "gateway.log"
    log.parent.mkdir()
    lines = [
        {"event": "request", "tenant": "acme-research", "header": f"Bearer {KEY}"},
        {
            "event": "pull",
            "url": "https://me:pass1234@example.org/x?X-Amz-Signature=abcdef",
            "file": f"{tmp_path}/models/x",
        },
        {"event": "env", "value": "hunter2-hunter2"},
        {"event": "connect", "peer": "vm:80"},
        {"event": "request", "client": "203.0.113.77"},
        {"event": "request", "client": "2001:db8::77"},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("SOME_API_TOKEN", "hunter2-hunter2")
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    found = bundle(tmp_path, monkeypatch, yaml.safe_dump(config))
    expected = {"machine.json", "doctor.json", "configuration.yaml", "models.json", "status.json", "metrics.txt"}
    assert set(found) == expected | {"logs/gateway.log"}
    whole = "\n".join(found.values())
    for secret in (KEY, "acme-research", "203.0.113", "db8", "pass1234", "abcdef", "hunter2", str(tmp_path)):
        assert secret not in whole
    shown = [json.loads(line) for line in found["logs/gateway.log"].splitlines()]
    assert shown[0] == {"event": "request", "tenant": "TENANT-1", "header": f"Bearer {MASK}"}
    assert shown[1]["file"] == "STARLING_HOME/models/x"
    assert shown[3]["peer"] == "HOST:80"
    assert json.loads(found["machine.json"])["versions"]["llvmlite"]
    assert {one["check"] for one in json.loads(found["doctor.json"])} > {"memory"}


def test_logs_are_cut_to_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "kv.log").write_text("".join(f"line {i:06d}\n" for i in range(10_000)))
    found = bundle(tmp_path, monkeypatch, "{}", "--log-kb", "1")["logs/kv.log"].splitlines()
    assert found == [f"line {i:06d}" for i in range(10_000 - len(found), 10_000)]
    assert 80 <= len(found) <= 86


def test_a_wrong_configuration_is_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = bundle(tmp_path, monkeypatch, "server: {prot: 1}")
    assert "server.prot" in found["configuration.txt"]
    assert "status.json" not in found


def test_a_file_that_exists_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine"
    path.write_text("mine")
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    done = CliRunner().invoke(cli, ["support-bundle", "--output", str(path)])
    assert done.exit_code == 2
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["mine"]


def test_what_cannot_be_written_to_the_end_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt would find a file that is no bundle."""
    path = tmp_path / "bundle.tar.gz"
    monkeypatch.setenv("STARLING_HOME", str(tmp_path / "home"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as a disk that has 100 bytes left
    try:
        done = CliRunner().invoke(cli, ["support-bundle", "--output", str(path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert isinstance(done.exception, ResourceError)
    assert "cannot be written" in done.exception.message
    assert not path.exists()


@given(TEXTS, st.text(min_size=3, max_size=30).filter(lambda secret: secret not in MASK), TEXTS)
def test_a_known_secret_never_stays(before: str, secret: str, after: str) -> None:
    text = Redaction([secret]).text(before + secret + after)
    assert secret not in text.replace(MASK, "\0")


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abc.DEF-123", "abc.DEF-123"),
        ("key sk-proj_12345678 refused", "sk-proj_12345678"),
        ('{"api_key": "0123456789"}', "0123456789"),
        ("HF token hf_abcdefghijk", "hf_abcdefghijk"),
        ("-----BEGIN PRIVATE KEY-----\nMIIabc\n-----END PRIVATE KEY-----", "MIIabc"),
        ("-----BEGIN PRIVATE KEY-----\nMIIabc", "MIIabc"),
        ("https://h/x?a=1&sig=abc%2Fdef&b=2", "abc%2Fdef"),
        ("AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
    ],
)
def test_what_looks_like_a_secret_is_removed(text: str, secret: str) -> None:
    assert secret not in Redaction().text(text)


def test_what_is_none_stays() -> None:
    text = '{"event": "request", "prompt_tokens": 61, "first_token_ms": 94.5, "model": "m", "token": 7}'
    assert Redaction(["ab", ""]).text(text) == text
