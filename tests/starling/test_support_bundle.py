"""`starling support-bundle`: what is in it, what is not, and that it is written when nothing else works."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import tarfile
import time
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


def test_tenants_of_stored_keys_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they stand as fields: a name that is an ordinary word, and one that a configuration has besides."""
    config = {"rate_limits": {}, "scheduler": {"tenant_weights": {"weighted-corp": 2}}}
    monkeypatch.setenv("STARLING_HOME", str(tmp_path))
    for name, tenant in (("first", "globex"), ("the-key-of-initech", "initech")):
        done = CliRunner().invoke(cli, ["keys", "add", name, "--tenant", tenant])
        assert done.exit_code == 0, done.output
    log = tmp_path / "logs" / "gateway.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("".join(json.dumps({"event": "request", "tenant": name}) + "\n" for name in ("globex", "initech")))
    found = bundle(tmp_path, monkeypatch, yaml.safe_dump(config))
    whole = "\n".join(found.values())
    for name in ("globex", "initech", "weighted-corp"):
        assert name not in whole
    shown = [json.loads(line)["tenant"] for line in found["logs/gateway.log"].splitlines()]
    assert len(set(shown)) == 2 and all(name.startswith("TENANT-") for name in shown)


def test_what_plugins_print_and_are_given_is_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin sees prompts and answers, and its options may have credentials under any name."""
    options = {"webhook": "https://hooks.example.org/CANARY-1", "lists": [{"door": "CANARY-22"}], "limit": 3}
    plugin = {"name": "redaction", "object": "starling.plugins.redaction:Redaction", "options": options}
    (tmp_path / "logs").mkdir()
    printed = {
        "event": "output of a helper process",
        "plugin": "redaction",
        "text": "the prompt is CANARY-3\u2028CANARY-5\x85CANARY-6",
    }
    failed = {"event": "a plugin cannot be started", "plugin": "redaction", "reason": "no answer from CANARY-22"}
    other = {"event": "output of a helper process", "helper": "parser", "text": "Traceback"}
    # As a log has them: U+2028 is not escaped, and ends no line.
    lines = [json.dumps(line, ensure_ascii=False) for line in (printed, failed, other)] + [
        '{"plugin": "redaction", "text": "CANARY-4'
    ]
    (tmp_path / "logs" / "gateway.log").write_text("\n".join(lines) + "\n")
    found = bundle(tmp_path, monkeypatch, yaml.safe_dump({"plugins": [plugin]}))
    assert "CANARY" not in "\n".join(found.values())
    shown = yaml.safe_load(found["configuration.yaml"])["plugins"][0]["options"]
    assert shown == {"webhook": MASK, "lists": [{"door": MASK}], "limit": 3}
    first, second, third, cut = found["logs/gateway.log"].splitlines()
    assert json.loads(first) == {**printed, "text": "[40 characters]"}
    assert json.loads(second)["reason"] == f"no answer from {MASK}"
    assert json.loads(third) == other
    assert cut == "[a line of 41 characters that is no JSON]"


def test_logs_of_agents_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs" / "agents").mkdir(parents=True)
    (tmp_path / "logs" / "agents" / "agent-1.log").write_text('{"event": "joined"}\n')
    assert bundle(tmp_path, monkeypatch, "{}")["logs/agents/agent-1.log"] == '{"event": "joined"}\n'


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


def test_the_help_page_has_the_exit_codes() -> None:
    page = CliRunner().invoke(cli, ["support-bundle", "--help"]).output
    codes = [line.split()[0] for line in page.split("Exit codes:\n")[1].splitlines() if line[4:5] != " "]
    assert codes == ["0", "2", "78", "130"]  # 78 is that of a ResourceError, 2 of a file that exists


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
        ("https://h/x?X-Amz-Security-Token=abc%2Fdef&b=2", "abc%2Fdef"),
        ("https://h/x?client_secret=abcdef0&b=2", "abcdef0"),
        ("https://h/x?access_token=abcdef0&b=2", "abcdef0"),
        ("hf_token=abcdef0", "abcdef0"),
        ("sk-proj_12345678: refused", "sk-proj_12345678"),
        ('{"aws_secret_access_key": "abcdef0"}', "abcdef0"),
        ('{"reason": "{\\"refresh_token\\": \\"abcdef0\\"}"}', "abcdef0"),
        ("AWS_SESSION_TOKEN='abcdef0'", "abcdef0"),
        ("db_password=abcdef0", "abcdef0"),
        ("Set-Cookie: session=abcdef0; Path=/", "abcdef0"),
        ("Authorization: Token abcdef0", "abcdef0"),
        ('{"Proxy-Authorization": "Negotiate abcdef0"}', "abcdef0"),
        ("given eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
        ("--key abcdef0 --url x", "abcdef0"),
        ("AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
    ],
)
def test_what_looks_like_a_secret_is_removed(text: str, secret: str) -> None:
    assert secret not in Redaction().text(text)


def test_what_is_none_stays() -> None:
    text = (
        '{"event": "request", "prompt_tokens": 61, "first_token_ms": 94.5, "model": "m", "token": 7, "id": "sk"}\n'
        '{"event": "the key file is read", "tokens": 1234567, "max_output_tokens": 4096, "key_type": "ed25519"}\n'
        "starling_tokens_generated_total 1234.0\ntls_key: /etc/starling/tls/privkey.pem\nkeys: 4\napi_keys: []\n"
    )
    assert Redaction(["ab", ""]).text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        'password: "CANARY1 CANARY2 CANARY3"',
        r'password: "a\"CANARY1 CANARY2"',
        r'{"reason": "{\"password\": \"CANARY1 CANARY2\"}"}',
        "password='CANARY1 CANARY2'",
        "passphrase: CANARY1 CANARY2 CANARY3",
        "password=[CANARY1]CANARY2",
        "password=ab,CANARY1",
        "token=ab;CANARY1",
        '{"token": ["CANARY1", "a]CANARY2"]}',
        '{\n  "token": [\n    "CANARY1",\n    "CANARY2"\n  ]\n}',
        "X-Amz-Signature=CANARY1",
        '{"X-Amz-Signature": "CANARY1"}',
        r'{"url": "https://h/x?a=1\u0026sig=CANARY1"}',
        "https://h/x?a=1&amp;sig=CANARY1",
        "https%3A%2F%2Fh%2Fx%3Fsig%3DCANARY1",
        "gho_CANARY1",
        "github_pat_CANARY1",
        "glpat-CANARY1",
        "HTTP_COOKIE=CANARY1",
        '{"token":12345,"secret": 12345, "token": "CANARY1"}',
        '{"args": ["--api-key", "CANARY1", "x"]}',
        "password: CAN",
    ],
)
@pytest.mark.parametrize("tenant", ["nothing", "password", "token"])
def test_no_part_of_a_secret_stays(text: str, tenant: str) -> None:
    shown = Redaction(names=[(tenant, "TENANT-1")]).text(text)
    assert "CANARY" not in shown
    if text.startswith("{") and tenant == "nothing":
        json.loads(shown)


def test_other_fields_stay_what_they_are() -> None:
    shown = Redaction().text('{"password": null, "x": "y", "passphrase": 12345, "z": [1]}')
    assert json.loads(shown) == {"password": "[redacted]", "x": "y", "passphrase": "[redacted]", "z": [1]}
    assert Redaction().text("password: abc\nname: x") == "password: [redacted]\nname: x"


def test_json_stays_json_whatever_tenants_are_called() -> None:
    names = ("1", "null", "true", "0.5", "acme")
    text = '{"a": [1, null, true, 0.5], "tenant": "1", "b": {"null": "acme"}}'
    shown = json.loads(Redaction(names=[(name, f"TENANT-{name}-") for name in names]).text(text))
    assert shown == {"a": [1, None, True, 0.5], "tenant": "TENANT-1-", "b": {"TENANT-null-": "TENANT-acme-"}}


def test_many_names_and_long_lines_take_little_time() -> None:
    """Of the processor, of this thread: what was quadratic took 20 s and more."""
    begun = time.thread_time()
    redaction = Redaction(names=[(f"tenant-{number}-of-many", f"TENANT-{number}") for number in range(1000)])
    shown = redaction.text("a line about tenant-7-of-many and others\n" * 5000)
    assert shown == "a line about TENANT-7 and others\n" * 5000
    for piece in ("-", "--", "token=[", "password", "password=", "token='", 'token="\\', "&sig=", "a-", "token [ "):
        redaction.text(piece * (20_000 // len(piece)))
    assert time.thread_time() - begun < 10
