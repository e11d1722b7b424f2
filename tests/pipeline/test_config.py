"""The configuration: accepted input resolves as documented; errors name key, value and reason."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.config import schema
from pipeline.config.env import ALIASES
from pipeline.config.load import find_file, load, render, resolve
from pipeline.config.rules import UNAVAILABLE
from pipeline.config.schema import DEMO_MODEL, Config
from pipeline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------ what is accepted


def test_an_empty_configuration_serves_the_demo_model() -> None:
    config = resolve({}, {})
    assert [model.name for model in config.models] == [DEMO_MODEL]
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8080)


SESSION_SERVER = """
server: {host: "0.0.0.0", port: 8080, request_timeout_ms: 30000}
models:
  - name: "llama-3-8b"
    path: "/models/llama-3-8b-q4.gguf"
    max_batch_size: 8
    max_sessions: 100
    kv_cache_mb: 4096
    spill_path: "/tmp/starling/kv"
scheduler: {max_queue_depth: 1000, batch_timeout_ms: 5}
rate_limits: {requests_per_minute: 60, tokens_per_minute: 10000}
auth: {api_keys: ["sk-..."]}
"""

ENGINE = """
[server]
host = "0.0.0.0"
port = 8080
max_concurrent_requests = 100
enable_cors = true
[model]
name = "microsoft/DialoGPT-medium"
model_path = "/models/DialoGPT-medium.gguf"
device = "cpu"
max_sequence_length = 2048
[cache]
enabled = true
max_size_mb = 1024
eviction_policy = "lru"
max_sequences = 1000
[performance]
batch_size = 1
memory_pool_size_mb = 512
use_mmap = true
[logging]
level = "info"
format = "pretty"
log_requests = true
[metrics]
enabled = true
endpoint = "/metrics"
"""


def test_yaml_with_a_list_of_models(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(SESSION_SERVER)
    config = load(file, {})
    model = config.models[0]
    assert config.max_batch_size(model) == 8
    assert config.max_sessions(model) == 100
    assert config.kv_cache_bytes(model) == 4096 << 20
    assert model.spill_path == "/tmp/starling/kv"
    assert config.rate_limits.tokens_per_minute == 10000
    assert config.auth.api_keys[0].key == "sk-..."


def test_toml_with_one_model(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(ENGINE)
    config = load(file, {})
    model = config.models[0]
    assert model.name == "microsoft/DialoGPT-medium"
    assert model.slug == "microsoft--DialoGPT-medium"
    assert model.path == "/models/DialoGPT-medium.gguf"
    assert model.max_sequence_length == 2048
    # What the sections say for all models holds for the one that says nothing.
    assert config.max_batch_size(model) == 1
    assert config.kv_cache_bytes(model) == 1024 << 20
    assert config.max_sessions(model) == 1000


def test_a_model_without_a_name_is_named_after_its_file() -> None:
    assert resolve({"model": {"path": "/m/Tiny-Q8.gguf"}}, {}).models[0].name == "Tiny-Q8"


def test_aliases_of_model_keys() -> None:
    raw = {"models": [{"name": "a", "model_path": "/a.gguf", "threads": 2, "context": 512, "max_memory_mb": 64}]}
    model = resolve(raw, {}).models[0]
    assert (model.path, model.ranks, model.max_sequence_length, model.kv_cache_mb) == ("/a.gguf", 2, 512, 64)


def test_a_section_without_keys_is_ignored() -> None:
    assert resolve({"server": None, "models": None}, {}) == resolve({}, {})


def test_plain_keys_get_a_tenant_each() -> None:
    raw = {"auth": {"api_keys": ["sk-one", {"key": "sk-two", "tenant": "acme", "weight": 3, "admin": True}]}}
    one, two = resolve(raw, {}).auth.api_keys
    assert re.fullmatch(r"key-[0-9a-f]{8}", one.owner)
    assert (two.owner, two.weight, two.admin, one.admin) == ("acme", 3.0, True, False)


def test_tenant_weights_come_from_the_scheduler_then_the_keys() -> None:
    raw = {
        "auth": {"api_keys": [{"key": "k1", "tenant": "a", "weight": 2}, {"key": "k2", "tenant": "b"}]},
        "scheduler": {"tenant_weights": {"b": 5}},
    }
    config = resolve(raw, {})
    assert [config.tenant_weight(tenant) for tenant in ("a", "b", "c")] == [2.0, 5.0, 1.0]


# ------------------------------------------------------------------ the environment


def test_overrides_win_over_aliases_and_these_over_the_file() -> None:
    raw = {"server": {"port": 1, "host": "file"}, "logging": {"level": "debug"}}
    env = {"LLM_ENGINE_PORT": "2", "LLM_ENGINE_HOST": "alias", "STARLING_SERVER__PORT": "3"}
    config = resolve(raw, env)
    assert (config.server.port, config.server.host, config.logging.level) == (3, "alias", "debug")


def test_every_alias_reaches_its_key() -> None:
    values = {
        "LLM_ENGINE_HOST": "0.0.0.0",
        "LLM_ENGINE_PORT": "9000",
        "LLM_ENGINE_API_KEY": "your-secret-key",
        "LLM_ENGINE_MODEL_PATH": "/m/x.gguf",
        "LLM_ENGINE_DEVICE": "cpu",
        "LLM_ENGINE_MAX_SEQUENCE_LENGTH": "2048",
        "LLM_ENGINE_CACHE_ENABLED": "false",
        "LLM_ENGINE_CACHE_SIZE_MB": "77",
        "LLM_ENGINE_LOG_LEVEL": "warning",
    }
    assert set(values) == set(ALIASES)
    config = resolve({}, values)
    model = config.models[0]
    assert (config.server.host, config.server.port) == ("0.0.0.0", 9000)
    assert config.auth.api_keys[0].key == "your-secret-key"
    assert (model.name, model.path, model.max_sequence_length) == ("x", "/m/x.gguf", 2048)
    assert (config.cache.enabled, config.cache.max_size_mb, config.logging.level) == (False, 77, "warning")


def test_lists_by_index_append_in_numeric_order() -> None:
    env = {f"STARLING_MODELS__{i}__PATH": f"/m/{i}.gguf" for i in range(12)}
    assert [model.path for model in resolve({}, env).models] == [f"/m/{i}.gguf" for i in range(12)]


def test_whole_lists() -> None:
    env = {
        "STARLING_AUTH__API_KEYS": "sk-a, sk-b",
        "STARLING_MODELS__0__PATH": "/m/a.gguf",
        "STARLING_MODELS__0__CPUS": "[0, 2]",
        "STARLING_MODELS__0__RANKS": "2",
    }
    config = resolve({}, env)
    assert [key.key for key in config.auth.api_keys] == ["sk-a", "sk-b"]
    assert config.models[0].cpus == (0, 2)


def test_an_empty_variable_does_not_remove_the_keys_of_the_file() -> None:
    for text in ("", " ", ","):
        with pytest.raises(ConfigError, match=r"STARLING_AUTH__API_KEYS.*names no key; unset"):
            resolve({"auth": {"api_keys": ["sk-a"]}}, {"STARLING_AUTH__API_KEYS": text})
    assert resolve({"auth": {"api_keys": ["sk-a"]}}, {"STARLING_AUTH__API_KEYS": "[]"}).auth.api_keys == ()


def test_a_field_of_an_api_key_given_as_text() -> None:
    config = resolve({"auth": {"api_keys": ["sk-a"]}}, {"STARLING_AUTH__API_KEYS__0__TENANT": "acme"})
    assert (config.auth.api_keys[0].key, config.auth.api_keys[0].tenant) == ("sk-a", "acme")


def test_one_model_from_the_environment() -> None:
    model = resolve({}, {"STARLING_MODEL__PATH": "/m/a.gguf", "STARLING_MODEL__THREADS": "2"}).models[0]
    assert (model.name, model.path, model.ranks) == ("a", "/m/a.gguf", 2)


def test_the_demo_model_can_be_tuned_without_naming_it() -> None:
    model = resolve({}, {"STARLING_MODEL__RANKS": "1"}).models[0]
    assert (model.name, model.path, model.ranks) == (DEMO_MODEL, "", 1)


def test_text_is_not_converted() -> None:
    env = {"STARLING_MODELS__0__NAME": "007", "STARLING_MODELS__0__PATH": "1e3"}
    model = resolve({}, env).models[0]
    assert (model.name, model.path) == ("007", "1e3")


def test_remote_edges_allow_other_machines_where_no_memory_is_shared() -> None:
    raw = {"server": {"remote_edges": True}, "edges": {"gateway-tokenizer": "tcp://192.0.2.1:7001"}}
    assert resolve(raw, {}).edges == raw["edges"]


def test_edges_may_be_written_with_underscores() -> None:
    config = resolve({}, {"STARLING_EDGES__SCHEDULER_KV": "tcp://127.0.0.1:7001"})
    assert config.edges == {"scheduler-kv": "tcp://127.0.0.1:7001"}


@pytest.mark.parametrize("text", ["1", "true", "yes", "on", "True"])
def test_booleans(text: str) -> None:
    assert resolve({}, {"STARLING_SERVER__ENABLE_CORS": text}).server.enable_cors is True


def test_variables_that_are_not_settings_are_ignored() -> None:
    assert resolve({}, {"STARLING_HOME": "/x", "STARLING_ISA": "portable", "PATH": "/bin"}) == resolve({}, {})


@given(st.integers(0, 65535), st.booleans(), st.integers(1, 1000), st.sampled_from(["lru", "lfu", "fifo"]))
def test_file_and_environment_give_the_same_configuration(port: int, cors: bool, depth: int, policy: str) -> None:
    raw = {
        "server": {"port": port, "enable_cors": cors},
        "scheduler": {"max_queue_depth": depth},
        "cache": {"eviction_policy": policy},
    }
    env = {
        f"STARLING_{section.upper()}__{key.upper()}": str(value)
        for section, keys in raw.items()
        for key, value in keys.items()
    }
    assert resolve(raw, {}) == resolve({}, env)


# ------------------------------------------------------------------ files


def test_search_order_of_the_file(tmp_path: Path) -> None:
    shipped = ROOT / "configs" / "default.yaml"
    assert find_file(None, {}, tmp_path) == shipped
    (tmp_path / "starling.toml").touch()
    assert find_file(None, {}, tmp_path) == tmp_path / "starling.toml"
    (tmp_path / "starling.yaml").touch()
    assert find_file(None, {}, tmp_path) == tmp_path / "starling.yaml"
    assert find_file(None, {"STARLING_CONFIG": "/c.yaml"}, tmp_path) == Path("/c.yaml")
    assert find_file("/d.yaml", {"STARLING_CONFIG": "/c.yaml"}, tmp_path) == Path("/d.yaml")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.yaml", b"server: [", "not YAML"),
        ("a.yaml", b"server:\n  port: 1\n  port: 2\n", "'port' is given twice"),
        ("a.yaml", b"- 1\n", "expected sections"),
        ("a.yaml", b"\xff\xfe", "byte 0 is not UTF-8"),
        ("a.yaml", b"a: !!python/object/apply:os.system [ls]\n", "not YAML"),
        ("a.yaml", b"#" * ((1 << 20) + 1), "larger than"),
        ("a.yaml", b"? [a]\n: b\n", "not YAML"),
        ("a.json", b'{"server": {"port": 1, "port": 2}}', "'port' is given twice"),
        ("a.json", b'{"server": {"port": 1', "not YAML"),
        ("a.json", b"[" * 10_000, "not YAML"),
        ("a.json", b'{"tracing": {"otlp": {"sample_ratio": NaN}}}', "sample_ratio"),
        ("a.toml", b"[server", "not TOML"),
        ("a.toml", b"[server]\nport = 1\nport = 2\n", "not TOML"),
        ("none.yaml", None, "No such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(file))) as caught:
        load(file, {})
    assert reason in caught.value.message


@pytest.mark.parametrize(
    "content", ['{"tracing": {"otlp": {"sample_ratio": 5e-1}}}', "# YAML\ntracing: {otlp: {sample_ratio: 0.5}}\n"]
)
def test_a_json_file_may_be_json_or_yaml(tmp_path: Path, content: str) -> None:
    """YAML 1.1 has no number `5e-1`."""
    file = tmp_path / "a.json"
    file.write_text(content)
    assert load(file, {}).tracing.otlp.sample_ratio == 0.5


def test_a_directory_is_refused_as_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, {})


def test_printing_gives_an_equivalent_file(tmp_path: Path) -> None:
    raw = {"models": [{"name": "a", "path": "/a.gguf", "cpus": [0, 1]}], "server": {"port": 0}}
    config = resolve(raw, {})
    file = tmp_path / "printed.yaml"
    file.write_text(render(config))
    assert load(file, {}) == config


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70000) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "path", "port", "key", "responses", "x", "model", "cpus"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
sections = st.sampled_from([field.name for field in msgspec.structs.fields(Config)] + ["model", "x"])
variables = st.sampled_from(
    ["STARLING_MODELS__0__PATH", "STARLING_SERVER__PORT", "STARLING_AUTH__API_KEYS__0", "STARLING_X__Y"]
)


settings_ = st.dictionaries(variables, st.text(max_size=6), max_size=3)


@given(st.dictionaries(sections, plain, max_size=4), settings_)
@example({"auth": {"api_keys": [[]]}}, {"STARLING_AUTH__API_KEYS__0__KEY": "x"})
def test_any_input_is_accepted_or_refused_with_a_message(raw: dict[str, Any], env: dict[str, str]) -> None:
    config, refusal = None, None
    try:
        config = resolve(raw, env)
    except ConfigError as error:
        refusal = error
    if config is not None:
        assert config.models
        assert render(config)
    else:
        assert refusal is not None
        assert refusal.param
        assert refusal.message.startswith("the configuration cannot be used:\n  ")


# The expressions in which the code reads a section: `x.name` alone would be found for any object.
RECEIVERS = {
    "EngineConfig": "engine|_engine|one",
    "ServerConfig": "server",
    "ModelConfig": "model|settings|draft",
    "AdapterConfig": "adapter",
    "SchedulerConfig": "scheduler|s",
    "ConstraintsConfig": "constraints|bounds",
    "RateLimitsConfig": "rate_limits|limits",
    "ApiKey": "key",
    "AuthConfig": "auth",
    "ResponseCacheConfig": "responses|config",
    "CacheConfig": "cache",
    "StoredResponsesConfig": "config",
    "PerformanceConfig": "performance",
    "LoggingConfig": "logging",
    "MetricsConfig": "metrics",
    "AgentConfig": "agent",
    "FleetConfig": "fleet",
    "FleetTlsConfig": "tls",
    "OrchestratorConfig": "orchestrator|bounds",
    "KubernetesConfig": "_cluster",
    "RayConfig": "_settings",
    "OnDemandConfig": "on_demand",
    "RegistryConfig": "registry",
    "TracingConfig": "tracing|config",
    "PluginConfig": "plugin|config",
    "OtlpConfig": "otlp|config|_config",
    "Config": "config|self|c",
}


@functools.cache
def reading_code() -> dict[str, list[str]]:
    """Return the lines that can read the configuration, by each `.name` in them; not the rules that refuse values."""
    schema_text = (ROOT / "pipeline" / "config" / "schema.py").read_text()
    texts = [schema_text[schema_text.index("class Config(") :]]  # its methods answer for some
    for folder in ("starling", "pipeline", "stages", "shm"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent != ROOT / "pipeline" / "config" or path.name in ("paths.py", "addresses.py"):
                texts.append(path.read_text())
    lines: dict[str, list[str]] = {}
    for line in "\n".join(texts).splitlines():
        for name in set(re.findall(r"\.(\w+)", line)):
            lines.setdefault(name, []).append(line)
    return lines


def unread_keys(lines: dict[str, list[str]]) -> set[str]:
    """Return the keys, as `Section.field`, that `lines` (as of `reading_code`) read nowhere."""
    unread = set()
    for section in vars(schema).values():
        if not isinstance(section, type) or not issubclass(section, schema.Section) or section is schema.Section:
            continue
        for field in msgspec.structs.fields(section):
            read = re.compile(rf"\b(?:{RECEIVERS[section.__name__]})\.{field.name}\b")
            outside = any(map(read.search, lines.get(field.name, ())))
            if not outside and (section, field.name) != (schema.ApiKey, "tenant"):  # read as ApiKey.owner
                unread.add(f"{section.__name__}.{field.name}")
    return unread


def test_every_key_is_read() -> None:
    """A key that no module reads would be accepted without effect; unavailable keys are refused by name."""
    sections = {"models": "ModelConfig", "performance": "PerformanceConfig"}
    refused = {f"{sections[key.split('.')[0]]}.{key.split('.')[-1]}" for key in UNAVAILABLE}
    assert unread_keys(reading_code()) == refused


@pytest.mark.parametrize("key", ["ModelConfig.name", "ModelConfig.path", "ApiKey.weight", "ServerConfig.host"])
def test_a_key_that_is_not_read_is_found(key: str) -> None:
    """Attributes of the same name that belong to other objects do not count."""
    section, field = key.split(".")
    lines = [re.sub(rf"\b({RECEIVERS[section]})\.{field}\b", r"\1.removed", line) for line in reading_code()[field]]
    assert not any(f"thread.{field}" in line for line in lines)
    assert key in unread_keys({**reading_code(), field: [*lines, f"thread.{field}"]})


def test_a_tenant_has_one_salt() -> None:
    keys = [{"key": "sk-a", "tenant": "t", "cache_salt": "one"}, {"key": "sk-b", "tenant": "t"}]
    with pytest.raises(ConfigError) as error:
        resolve({"auth": {"api_keys": keys}}, {})
    assert "auth.api_keys.1.cache_salt" in error.value.message
    with pytest.raises(ConfigError) as error:
        resolve({"auth": {"api_keys": [{"key": "sk-a", "cache_salt": "a\0b"}]}}, {})
    assert "auth.api_keys.0.cache_salt" in error.value.message
    assert resolve({"auth": {"api_keys": keys[:1]}}, {}).tenant_salt("t") == "one"


def test_tenants_are_isolated_unless_they_share() -> None:
    keys = [
        {"key": "sk-a", "tenant": "a"},
        {"key": "sk-b", "tenant": "b"},
        {"key": "sk-c", "tenant": "c", "share_cache": True},
        {"key": "sk-d", "tenant": "d", "share_cache": True},
        {"key": "sk-e", "tenant": "e", "cache_salt": "team"},
        {"key": "sk-f", "tenant": "f", "cache_salt": "team"},
        "sk-g",
    ]
    config = resolve({"auth": {"api_keys": keys}}, {})
    salts = [config.tenant_salt(tenant) for tenant in "abcdef"] + [config.tenant_salt(config.auth.api_keys[6].owner)]
    assert len(set(salts)) == 5
    assert salts[2] == salts[3] == ""
    assert salts[4] == salts[5] == "team"
    assert resolve({}, {}).tenant_salt("default") == ""
    for more in ({"cache_salt": "x"}, {"tenant": "a"}):
        with pytest.raises(ConfigError) as error:
            resolve({"auth": {"api_keys": [keys[0], {"key": "sk-x", "share_cache": True, **more}]}}, {})
        assert "auth.api_keys.1.share_cache" in error.value.message


def test_plugins_must_be_installed_and_have_names_of_their_own() -> None:
    plugin = {"name": "mine", "object": "my_package:Plugin"}
    assert resolve({"plugins": [plugin]}, {}).plugins[0].on_failure == "refuse"
    with pytest.raises(ConfigError, match=r"plugins\.1\.name = mine.*the same name"):
        resolve({"plugins": [plugin, plugin]}, {})
    with pytest.raises(ConfigError, match=r"no installed package has an entry point 'absent'"):
        resolve({"plugins": [{"name": "absent"}]}, {})
    with pytest.raises(ConfigError, match=r"expected MODULE:CLASS"):
        resolve({"plugins": [{"name": "mine", "object": "my_package.Plugin"}]}, {})
