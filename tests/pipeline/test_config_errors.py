"""Refused configurations: messages name key, value and reason, and never a secret."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.check import PROBLEMS_MAX
from pipeline.config.file import read_file
from pipeline.config.load import render, resolve
from pipeline.config.rules import UNAVAILABLE
from pipeline.config.schema import DEMO_MODEL, mask
from pipeline.errors import ConfigError


def refused(raw: dict[str, Any], env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(raw, env or {})
    return caught.value.message


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({"server": {"prot": 1}}, ["server.prot", "no such key", "did you mean port?"]),
        ({"sever": {}}, ["sever", "did you mean server?"]),
        ({"cache": {"port": 1}}, ["cache.port", "belongs to server"]),
        ({"server": {"port": 99999}}, ["server.port = 99999", "a whole number of at most 65535"]),
        ({"server": {"port": "8080"}}, ["server.port = '8080'", "expected a whole number, got text"]),
        ({"server": {"port": True}}, ["server.port = True", "expected a whole number, got true or false"]),
        ({"server": {"host": 3}}, ["server.host = 3", "expected text"]),
        ({"server": 3}, ["server = 3", "expected keys (host, port"]),
        ({"server": {"request_timeout_ms": 0}}, ["server.request_timeout_ms = 0", "at least 1"]),
        ({"server": {"host": "a b"}}, ["server.host = 'a b'"]),
        ({"server": {"host": "127.0..1"}}, ["server.host = '127.0..1'", "expected a host name or an address"]),
        ({"fleet": {"agent": {"host": "a" * 64}}}, ["fleet.agent.host", "expected a host name or an address"]),
        ({"fleet": {"agent": {"advertise": "10.0..1"}}}, ["fleet.agent.advertise = '10.0..1'"]),
        ({"fleet": {"orchestrator": {"host": "10.0..1"}}}, ["fleet.orchestrator.host = '10.0..1'"]),
        ({"logging": {"format": "jsn"}}, ["logging.format = 'jsn'", "json, pretty", "did you mean json?"]),
        ({"models": [{"name": "x", "path": "y", "kv_type": "f8"}]}, ["models.0.kv_type = 'f8'", "f16, f32"]),
        ({"models": [{"path": 3}]}, ["models.0.path = 3", "models.0.name: missing"]),
        ({"models": [{"name": "unknown"}]}, ["models.0.path: missing", DEMO_MODEL]),
        ({"models": ["x"]}, ["models.0 = 'x'", "expected keys"]),
        ({"models": [{"name": "../x", "path": "p"}]}, ["models.0.name = '../x'"]),
        ({"models": [{"name": "a", "path": "p"}] * 2}, ["models.1.name = 'a'", "models.0 has this name"]),
        ({"models": [{"name": "a", "path": "p", "sha256": "12"}]}, ["models.0.sha256", "64 hexadecimal"]),
        ({"models": [{"name": "a", "path": "p", "cpus": [1, 1]}]}, ["models.0.cpus = [1, 1]", "twice"]),
        ({"models": [{"name": "a", "path": "p", "cpus": [1], "ranks": 2}]}, ["models.0.ranks = 2"]),
        ({"models": [{"path": "p", "spill_mb": 9}]}, ["models.0.spill_mb = 9", "set spill_path too"]),
        (
            {"models": [{"name": "a", "path": "p", "draft_model": "c"}, {"name": "b", "path": "p"}]},
            ["models.0.draft_model = 'c'", "no model of this name", "(b)"],
        ),
        ({"models": [{"name": "a", "path": "p", "draft_model": "a"}]}, ["models.0.draft_model = 'a'", "itself"]),
        (
            {
                "models": [
                    {"name": "a", "path": "p", "draft_model": "b"},
                    {"name": "b", "path": "p", "draft_model": "a"},
                ]
            },
            ["models.0.draft_model = 'b'", "models.1.draft_model = 'a'", "drop one of the keys"],
        ),
        ({"models": [{"name": "a", "path": "p", "model_path": "q"}]}, ["models.0.model_path", "the same as"]),
        ({"model": {"name": "a"}, "models": []}, ["model: given beside models"]),
        ({"model": {"name": "a", "path": "p", "page_tokens": 48}}, ["models.0.page_tokens = 48", "16, 32"]),
        ({"performance": {"batch_size": 600}}, ["scheduler.max_step_tokens = 512", "performance.batch_size"]),
        ({"model": {"path": "p", "device": "cuda"}}, ["models.0.device = 'cuda'", "the only device is cpu"]),
        ({"fleet": {"tls": {"cert": "c", "key": "k"}}}, ["fleet.tls.ca", "set cert, key and ca, or none"]),
        ({"fleet": {"tls": {"required": True}}}, ["fleet.tls.required = True", "needs TLS"]),
        (
            {"fleet": {"tls": {"cert": "c", "key": "k", "ca": "a", "denied": "d"}}},
            ["fleet.tls.denied = 'd'", "by the fleet's token", "fleet.tls.required"],
        ),
        ({"metrics": {"endpoint": "/v1/x"}}, ["metrics.endpoint = '/v1/x'", "taken"]),
        ({"metrics": {"endpoint": "/docs"}}, ["metrics.endpoint = '/docs'", "taken"]),
        ({"metrics": {"endpoint": "/openapi.json"}}, ["metrics.endpoint = '/openapi.json'", "taken"]),
        ({"tracing": {"otlp": {"endpoint": "127.0.0.1:4318"}}}, ["tracing.otlp.endpoint", "http://127.0.0.1:4318"]),
        (
            {"tracing": {"otlp": {"endpoint": "http://u:p@c:4318"}}},
            ["tracing.otlp.endpoint", "credentials", "OTEL_EXPORTER_OTLP_HEADERS"],
        ),
        ({"tracing": {"otlp": {"sample_ratio": 1.5}}}, ["tracing.otlp.sample_ratio", "1.5"]),
        ({"metrics": {"endpoint": "metrics"}}, ["metrics.endpoint = 'metrics'", "a path like"]),
        ({"edges": {"a-b": "tcp://h:1"}}, ["edges.a-b", "no such edge", "scheduler-kv"]),
        ({"edges": {"scheduler-kv": "udp://x"}}, ["edges.scheduler-kv", "'udp://x'"]),
        ({"edges": {"scheduler-kv": "tcp://*:70"}}, ["edges.scheduler-kv", "loopback"]),
        ({"edges": {"gateway-kv": "tcp://192.0.2.1:70"}}, ["edges.gateway-kv", "not a loopback", "remote_edges: true"]),
        (
            {"server": {"remote_edges": True}, "edges": {"scheduler-worker": "tcp://192.0.2.1:70"}},
            ["edges.scheduler-worker = 'tcp://192.0.2.1:70'", "scheduler and worker share memory"],
        ),
        (
            {"edges": {"scheduler-kv": "ipc:///a", "scheduler-worker": "ipc:///a"}},
            ["edges.scheduler-worker = 'ipc:///a'", "edges.scheduler-kv has this address already"],
        ),
        ({"server": {"run_dir": "/a", "state_dir": "/a"}}, ["server.state_dir = '/a'"]),
        ({"server": {"state_dir": "~no-such-user/x"}}, ["server.state_dir = '~no-such-user/x'", "no such user"]),
        ({"model": {"path": "~no-such-user/m.gguf"}}, ["models.0.path = '~no-such-user/m.gguf'", "no such user"]),
        ({"model": {"path": "file://~no-such-user/m.gguf"}}, ["models.0.path", "no such user"]),
        ({"model": {"path": "/m", "chat_template": "~no-such-user/x"}}, ["models.0.chat_template", "no such user"]),
        ({"fleet": {"store": "sqlite:~no-such-user/x"}}, ["fleet.store", "no such user"]),
        (
            {"model": {"path": "p", "max_sequence_length": 100}, "scheduler": {"max_prompt_tokens": 100}},
            ["scheduler.max_prompt_tokens = 100", "max_sequence_length = 100"],
        ),
        ({"auth": {"api_keys": "sk"}}, ["auth.api_keys", "expected a list"]),
        ({"auth": {"api_keys": ["a b"]}}, ["auth.api_keys.0.key", "without spaces"]),
        ({"auth": {"api_keys": ["abc", "abc"]}}, ["auth.api_keys.1.key", "the same key as auth.api_keys.0"]),
        (
            {"auth": {"api_keys": [{"key": f"k{w}", "tenant": "t", "weight": w} for w in (1, 2)]}},
            ["auth.api_keys.1.weight = 2.0", "tenant 't'"],
        ),
        ({"scheduler": {"tenant_weights": {"a": 0}}}, ["scheduler.tenant_weights.a = 0", "at least 0.01"]),
        ({"scheduler": {"tenant_weights": {1: 1.0}}}, ["scheduler.tenant_weights.1", "put it in quotes"]),
    ],
)
def test_errors_name_key_value_and_reason(raw: dict[str, Any], parts: list[str]) -> None:
    message = refused(raw)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({"STARLING_SERVER__PORT": "abc"}, ["server.port = 'abc' (STARLING_SERVER__PORT)", "got text"]),
        ({"STARLING_SERVER__PROT": "1"}, ["server.prot (STARLING_SERVER__PROT)", "did you mean port?"]),
        ({"STARLING_SERVER_PORT": "1"}, ["STARLING_SERVER_PORT", "did you mean STARLING_SERVER__PORT?"]),
        ({"STARLING_SERVRE__PORT": "1"}, ["servre", "did you mean server?"]),
        ({"LLM_ENGINE_PROT": "1"}, ["LLM_ENGINE_PROT", "did you mean LLM_ENGINE_PORT?"]),
        ({"STARLING_MODELS__1__PATH": "x"}, ["models.1.path", "an index from 0 to 0"]),
        ({"STARLING_MODELS__X__PATH": "x"}, ["models.x.path", "an index from 0 to 0"]),
        ({"STARLING_SERVER__PORT__X": "1"}, ["server.port = {'x': 1} (STARLING_SERVER__PORT__X)"]),
        ({"STARLING_SCHEDULER__TENANT_WEIGHTS__A": ".nan"}, ["scheduler.tenant_weights.a = nan"]),
        ({"STARLING_RATE_LIMITS__TOKENS_PER_MINUTE": "-1"}, ["at least 0"]),
        ({"STARLING_SERVER": "{}"}, ["did you mean STARLING_SERVER__KEY?"]),
    ],
)
def test_errors_name_the_variable(env: dict[str, str], parts: list[str]) -> None:
    message = refused({}, env)
    for part in parts:
        assert part in message


def test_all_problems_are_reported_at_once() -> None:
    message = refused({"server": {"port": -1, "hots": "x"}, "logging": {"level": 3}}, {"LLM_ENGINE_X": ""})
    for part in ("server.port", "server.hots", "logging.level", "LLM_ENGINE_X"):
        assert f"\n  {part}" in message


@pytest.mark.parametrize("key", sorted(UNAVAILABLE))
def test_unavailable_keys_are_refused_unless_neutral(key: str) -> None:
    neutral = UNAVAILABLE[key].neutral
    other = not neutral if isinstance(neutral, bool) else "x" if isinstance(neutral, str) else neutral + 1

    def with_value(value: Any) -> dict[str, Any]:
        section, *path = key.split(".")
        if section == "models":
            return {"models": [{"name": DEMO_MODEL, path[-1]: value}]}
        tree: Any = value
        for part in reversed([section, *path]):
            tree = {part: tree}
        return dict(tree)

    resolve(with_value(neutral), {})
    assert UNAVAILABLE[key].reason in refused(with_value(other))


def test_secrets_are_not_in_messages_or_prints() -> None:
    secret = "sk-abcdefghijklmnop"
    config = resolve({"auth": {"api_keys": [secret]}}, {})
    assert secret not in render(config) + render(config, "json") + repr(config)
    assert mask(secret) in render(config)
    message = refused({"auth": {"api_keys": [{"key": secret, "tennant": "x"}, [secret]]}})
    assert secret not in message
    assert "auth.api_keys.0.tennant: no such key; did you mean tenant?" in message


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 10)}]\n" for before, after in pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("c.yaml", "a: !!int ''", "not YAML: a value is no valid int (line 1, column 4)"),
        ("c.yaml", "a: !!float ''", "not YAML: a value is no valid float (line 1, column 4)"),
        ("c.yaml", "a: !!bool x", "not YAML: a value is no valid bool (line 1, column 4)"),
        ("c.yaml", "a: !!timestamp x", "not YAML: a value is no valid timestamp (line 1, column 4)"),
        ("c.yaml", "a: 2020-99-99", "not YAML: a value is no valid timestamp (line 1, column 4)"),
        ("c.yaml", "a: &x [*x]", "not YAML: nested more than"),
        ("c.yaml", "a: &x {b: *x}", "not YAML: nested more than"),
        ("c.yaml", BOMB, "not YAML: more than 100,000 values; each use of an anchor counts"),
        ("c.yaml", "[" * 50_000, "not YAML: "),
        ("c.toml", "a = " + "[" * 50_000, "not TOML: "),
        ("c.toml", "a" + ".a" * 50 + " = 1", "not TOML: nested more than"),
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, name: str, text: str, reason: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert f"{name}: {reason}" in caught.value.message
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nkey: hunter2: x", "mapping values are not allowed here (line 2, column 13)"),
        (
            "key: [hunter2",
            "while parsing a flow sequence: expected ',' or ']', but got '<stream end>' (line 1, column 14)",
        ),
        ("key: *hunter2", "found undefined alias (line 1, column 6)"),
        ("a: &hunter2 1\nb: &hunter2 2", "found duplicate anchor (line 2, column 4)"),
        ("key: !hunter2 x", "could not determine a constructor for the tag (line 1, column 6)"),
        ("key: !hunter2!x y", "while parsing a node: found undefined tag handle (line 1, column 6)"),
        ("key: !!int hunter2", "a value is no valid int (line 1, column 6)"),
        ("key: !!bool hunter2", "a value is no valid bool (line 1, column 6)"),
        ("key: @hunter2", "found character '@' that cannot start any token (line 1, column 6)"),
        ('key: "\\q hunter2"', "found unknown escape character 'q' (line 1, column 8)"),
        ("hunter2\x07", "a character is not allowed (position 7)"),
    ],
)
def test_an_error_of_yaml_has_its_place_and_no_secret(tmp_path: Path, text: str, reason: str) -> None:
    """Support bundles and `starling doctor --json` keep the message."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert reason in caught.value.message
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize("text", ["key = hunter2", 'key = "hunter2', "key = ''hunter2''", 'key = "\\hunter2"'])
def test_an_error_of_toml_has_no_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not TOML: ") as caught:
        read_file(path)
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize("value", ["!!int ''", "!!bool x", "&x [*x]", "[" * 5000, "{a: 2020-99-99}"])
def test_a_hostile_variable_is_refused_as_text(value: str) -> None:
    assert "server.port = " in refused({}, {"STARLING_SERVER__PORT": value})


@pytest.mark.parametrize("index", ["\u00b2", "9" * 5000, "-1", "x"])
def test_an_index_that_is_no_number_is_refused(index: str) -> None:
    assert "expected an index from 0 to" in refused({}, {f"STARLING_MODELS__{index}__NAME": "m"})


@pytest.mark.parametrize(
    ("raw", "env"),
    [
        ({}, {"STARLING_MODELS__0__PATH": "\udcff"}),
        ({}, {"STARLING_SERVER__\udcff": "1"}),
        ({}, {"STARLING_SERVER__PORT": "\udcff"}),
        ({"server": {"\ud800": 1}}, {}),
        ({"server": {"host": "\ud800"}}, {}),
    ],
)
def test_a_message_about_what_is_no_text_can_be_printed(raw: dict[str, Any], env: dict[str, str]) -> None:
    assert "\\ud" in refused(raw, env).encode().decode()


def test_a_report_is_bounded() -> None:
    report = refused({"server": {f"unknown{i}": 1 for i in range(10_000)} | {"x" * 100_000: 1}})
    assert len(report.splitlines()) == PROBLEMS_MAX + 1
