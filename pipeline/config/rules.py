"""Rules that the types cannot express: impossible combinations, and keys that are not available.

Pure: a typed `Config` in, broken rules out.  A key in `UNAVAILABLE` is in the schema because configurations of
similar servers have it, and is refused at every value except the neutral one: no key is accepted without effect.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pipeline.config import core_rules, engine_rules, path_rules
from pipeline.config.addresses import check_address
from pipeline.config.schema import DEMO_MODEL, Config, ModelConfig
from pipeline.config.user_home import expand_user
from pipeline.durations import FORM, seconds_of
from pipeline.errors import ConfigError, InvalidRequest
from pipeline.models import sources
from pipeline.models.pretokenizers import PRETOKENIZERS
from pipeline.plugin_objects import object_of
from pipeline.protocol.topology import EDGES
from shm.sampler_steps import order_problem

MAX_PATH = 107  # bytes of a socket's path, of sockaddr_un

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_API_KEY = re.compile(r"[!-~]{1,256}")
_TENANT = re.compile(r"[A-Za-z0-9._@-]{0,64}")
_SALT = re.compile(r"[^\x00-\x1f\x7f]{0,128}")
_BLOB_SCHEMES = ("", "file", "http", "https", "s3", "gs", "az")
MAX_ADAPTERS = 64  # of a model
_RESERVED_PATHS = ("/v1", "/health", "/ready", "/lora-adapters", "/docs", "/web", "/openapi.json")


class Rule(NamedTuple):
    """A broken rule. `value` is printable; "" where there is none or it is secret."""

    key: str  # dotted
    value: str
    reason: str


class Unavailable(NamedTuple):
    """A key without effect, and the only value at which it is accepted."""

    neutral: Any
    reason: str


UNAVAILABLE = {
    "models.*.device": Unavailable("cpu", "the kernels run on the CPU; the only device is cpu"),
}


def check_rules(config: Config, pulled: Collection[str] = ()) -> Iterator[Rule]:
    """Every broken rule. `pulled`: the slugs of the names that `starling pull` has stored."""
    yield from _unavailable(config)
    yield from _models(config, pulled)
    yield from (Rule(*problem) for problem in core_rules.problems(config))
    yield from (Rule(*problem) for problem in path_rules.problems(config))
    yield from _limits(config)
    yield from _auth(config)
    yield from _idempotency(config)
    yield from _edges(config)
    yield from _sessions(config)
    yield from _server(config)
    yield from _tracing(config)
    yield from _fleet(config)
    yield from _fleet_tls(config)
    yield from _on_demand(config)
    yield from _plugins(config)


def _unavailable(config: Config) -> Iterator[Rule]:
    for pattern, (neutral, reason) in UNAVAILABLE.items():
        for key, value in _values(config, pattern.split("."), ""):
            if value != neutral:
                yield Rule(key, repr(value), reason)


def _values(node: Any, parts: list[str], key: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) for each match of a pattern, in which `*` matches every list item."""
    if not parts:
        yield key.removeprefix("."), node
    elif parts[0] == "*":
        for index, item in enumerate(node):
            yield from _values(item, parts[1:], f"{key}.{index}")
    else:
        yield from _values(getattr(node, parts[0]), parts[1:], f"{key}.{parts[0]}")


def check_name(name: str) -> str:
    """Why `name` is not a valid model name; "" when it is."""
    if name == "all":
        return "reserved: commands use it for all models"
    if len(name) <= 128 and _NAME.fullmatch(name):
        return ""
    return "expected up to 128 letters, digits, dots, dashes and underscores, in parts joined by single slashes"


def _models(config: Config, pulled: Collection[str]) -> Iterator[Rule]:
    seen: dict[str, int] = {}
    for index, model in enumerate(config.models):
        at = f"models.{index}"
        if reason := check_name(model.name):
            yield Rule(f"{at}.name", repr(model.name), reason)
        if model.slug in seen:
            taken = f"models.{seen[model.slug]} has this name already; rename one"
            yield Rule(f"{at}.name", repr(model.name), taken)
        seen.setdefault(model.slug, index)
        if not model.path and model.name != DEMO_MODEL and model.slug not in pulled:
            reason = f"missing; only the demo model ({DEMO_MODEL}) and pulled models (starling pull) are known by name"
            yield Rule(f"{at}.path", "", reason)
        published = model.path.removeprefix("catalog:")
        if published != model.path and (reason := check_name(published)):
            yield Rule(f"{at}.path", repr(model.path), f"names no published model: {reason}")
        if reason := _source(config, model):
            yield Rule(f"{at}.path", repr(model.path), reason)
        if model.sha256 and not _DIGEST.fullmatch(model.sha256):
            yield Rule(f"{at}.sha256", repr(model.sha256), "expected 64 hexadecimal digits")
        yield from _ranks(at, model)
        if model.spill_mb and not model.spill_path:
            yield Rule(f"{at}.spill_mb", str(model.spill_mb), "bounds a spill file: set spill_path too")
        if model.pretokenizer and model.pretokenizer not in PRETOKENIZERS:
            known = ", ".join(sorted(PRETOKENIZERS))
            yield Rule(
                f"{at}.pretokenizer", repr(model.pretokenizer), f"no pre-tokenizer has this name; known: {known}"
            )
        if reason := order_problem(model.sampler_order):
            yield Rule(f"{at}.sampler_order", repr(list(model.sampler_order)), reason)
        yield from _adapters(at, model)
        if model.draft_model and (reason := _draft(config, model)):
            yield Rule(f"{at}.draft_model", repr(model.draft_model), reason)


def check_adapter_name(name: str) -> str:
    """Why `name` is not a valid name of an adapter; "" when it is."""
    if _ADAPTER.fullmatch(name):
        return ""
    return "expected up to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"


def _adapters(at: str, model: ModelConfig) -> Iterator[Rule]:
    if len(model.adapters) > MAX_ADAPTERS:
        yield Rule(f"{at}.adapters", str(len(model.adapters)), f"a model has at most {MAX_ADAPTERS} adapters")
    names = [adapter.name for adapter in model.adapters]
    for index, adapter in enumerate(model.adapters):
        where = f"{at}.adapters.{index}"
        if reason := check_adapter_name(adapter.name):
            yield Rule(f"{where}.name", repr(adapter.name), reason)
        if names.index(adapter.name) != index:
            first = f"{at}.adapters.{names.index(adapter.name)}"
            yield Rule(f"{where}.name", repr(adapter.name), f"{first} has this name already; rename one")
        if not adapter.path or "://" in adapter.path:
            reason = "expected a GGUF file, or a PEFT directory, of this machine"
            yield Rule(f"{where}.path", repr(adapter.path), reason)


def _source(config: Config, model: ModelConfig) -> str:
    """Why the model must not be fetched from its path; "" if it may, or is a file."""
    if not model.path or not sources.is_remote(model.path):
        return ""
    try:
        sources.check_allowed(str(sources.parse(model.path)), config.registry.sources)
    except (ConfigError, InvalidRequest) as error:
        return error.message
    return ""


def _draft(config: Config, model: ModelConfig) -> str:
    """Why it cannot get its drafts there; "" when it can."""
    draft = config.model(model.draft_model)
    if draft is None:
        others = ", ".join(one.name for one in config.models if one.name != model.name)
        return f"no model of this name is configured; name another entry of models ({others or 'there is none'})"
    if draft.name == model.name:
        return "a model cannot draft for itself; name a smaller one, or drop the key"
    if draft.draft_model:
        return f"{draft.name} has a draft_model itself ({draft.draft_model}): drafts have none; drop one of the keys"
    return ""


def _ranks(at: str, model: ModelConfig) -> Iterator[Rule]:
    if len(set(model.cpus)) != len(model.cpus):
        yield Rule(f"{at}.cpus", repr(list(model.cpus)), "a core is given twice; its two ranks would spin")
    if model.cpus and model.ranks > len(model.cpus):
        yield Rule(f"{at}.ranks", str(model.ranks), f"each rank takes a core, and cpus has {len(model.cpus)}")


def _limits(config: Config) -> Iterator[Rule]:
    scheduler = config.scheduler
    for index, model in enumerate(config.models):
        batch = config.max_batch_size(model)
        if scheduler.max_step_tokens < batch:
            where = f"models.{index}.max_batch_size" if model.max_batch_size else "performance.batch_size"
            reason = f"less than {where} = {batch}, and each running sequence needs a position of the step"
            yield Rule("scheduler.max_step_tokens", str(scheduler.max_step_tokens), reason)
        length = model.max_sequence_length
        for name in ("max_prompt_tokens", "max_output_tokens"):
            bound = getattr(scheduler, name)
            if length and bound >= length:
                reason = f"models.{index}.max_sequence_length = {length} holds prompt and output together"
                yield Rule(f"scheduler.{name}", str(bound), reason)


def _idempotency(config: Config) -> Iterator[Rule]:
    server = config.server
    if server.idempotency_tenant_mb > server.idempotency_mb:
        reason = f"more than server.idempotency_mb = {server.idempotency_mb}, which bounds all tenants together"
        yield Rule("server.idempotency_tenant_mb", str(server.idempotency_tenant_mb), reason)


def _auth(config: Config) -> Iterator[Rule]:
    keys: dict[str, int] = {}
    weights: dict[str, tuple[int, float]] = {}
    for index, key in enumerate(config.auth.api_keys):
        at = f"auth.api_keys.{index}"
        if not _API_KEY.fullmatch(key.key):
            yield Rule(f"{at}.key", "", "expected 1 to 256 printable ASCII characters without spaces")
        if key.key in keys:
            yield Rule(f"{at}.key", "", f"the same key as auth.api_keys.{keys[key.key]}; drop one")
        keys.setdefault(key.key, index)
        if not _TENANT.fullmatch(key.tenant):
            yield Rule(f"{at}.tenant", repr(key.tenant), "expected up to 64 letters, digits and . _ @ -")
        first, weight = weights.setdefault(key.owner, (index, key.weight))
        if weight != key.weight:
            reason = f"auth.api_keys.{first} gives tenant {key.owner!r} the weight {weight}"
            yield Rule(f"{at}.weight", str(key.weight), reason)
        other = next(one for one in config.auth.api_keys if one.owner == key.owner)
        if key.cache_salt != other.cache_salt:
            reason = f"another key of tenant {key.owner!r} has {other.cache_salt!r}; a tenant has one"
            yield Rule(f"{at}.cache_salt", repr(key.cache_salt), reason)
        if key.share_cache != other.share_cache:
            reason = f"another key of tenant {key.owner!r} has another value; give all of them the same"
            yield Rule(f"{at}.share_cache", str(key.share_cache).lower(), reason)
        if key.share_cache and key.cache_salt:
            yield Rule(f"{at}.share_cache", "true", "cache_salt limits sharing to tenants of the same salt; drop one")
        if not _SALT.fullmatch(key.cache_salt):
            yield Rule(f"{at}.cache_salt", repr(key.cache_salt), "expected up to 128 printable characters")
        named = config.scheduler.tenant_weights.get(key.owner)
        if named is not None and key.weight not in (1.0, named):
            reason = f"scheduler.tenant_weights.{key.owner} is {named}"
            yield Rule(f"{at}.weight", str(key.weight), reason)


def _edges(config: Config) -> Iterator[Rule]:
    users: dict[str, str] = {}
    for name, address in config.edges.items():
        at = f"edges.{name}"
        if name not in EDGES:
            yield Rule(at, repr(address), f"no such edge; there are {', '.join(EDGES)}")
            continue
        try:
            check_address(address, config.server.remote_edges)
        except ConfigError as error:
            yield Rule(at, "", error.message)
        else:
            yield from _shared_memory(at, name, address)
        if address in users:
            yield Rule(at, repr(address), f"edges.{users[address]} has this address already")
        users.setdefault(address, name)


def _shared_memory(at: str, name: str, address: str) -> Iterator[Rule]:
    edge = EDGES[name]
    if edge.shares_memory:
        try:
            check_address(address)
        except ConfigError:
            reason = f"{edge.binder} and {edge.connector} share memory, so both run on one machine; use a loopback host"
            yield Rule(at, repr(address), reason)


def _sessions(config: Config) -> Iterator[Rule]:
    if not config.cache.session_ttl_s and not config.cache.max_sessions_per_tenant:
        reason = "sessions that never expire need a bound: set cache.max_sessions_per_tenant"
        yield Rule("cache.session_ttl_s", "0", reason)


def _server(config: Config) -> Iterator[Rule]:
    server = config.server
    if not _may_be_host(server.host) or not (server.host or server.unix_socket):
        reason = "expected a host name or an address to listen on; only with server.unix_socket may it be empty"
        yield Rule("server.host", repr(server.host), reason)
    if server.unix_socket and len(os.fsencode(os.path.abspath(expand_user(server.unix_socket)))) > MAX_PATH:
        reason = f"more than {MAX_PATH} bytes, which is what the address of a socket holds; name a shorter path"
        yield Rule("server.unix_socket", repr(server.unix_socket), reason)
    yield from _tls(config)
    for index, text in enumerate(server.trusted_proxies):
        if reason := _network_problem(text):
            yield Rule(f"server.trusted_proxies.{index}", repr(text), reason)
    if "unix" in server.trusted_proxies and not server.unix_socket:
        yield Rule("server.trusted_proxies", "'unix'", "there is no Unix socket: set server.unix_socket, or drop it")
    if server.run_dir and server.run_dir == server.state_dir:
        yield Rule("server.state_dir", repr(server.state_dir), "the run directory is emptied; use another")
    if server.body_buffer_mb < 2 * server.max_body_mb:
        reason = f"less than two bodies of server.max_body_mb = {server.max_body_mb}; one tenant has half of it"
        yield Rule("server.body_buffer_mb", str(server.body_buffer_mb), reason)
    endpoint = config.metrics.endpoint
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", endpoint):
        yield Rule("metrics.endpoint", repr(endpoint), "expected a path like /metrics")
    elif any(endpoint == path or endpoint.startswith(path + "/") for path in _RESERVED_PATHS):
        yield Rule("metrics.endpoint", repr(endpoint), "this path is taken by the API")


def _may_be_host(text: str) -> bool:
    """Whether the resolver takes the text; "" counts as one. A name that is none raises a `UnicodeError` there."""
    if any(c.isspace() for c in text):
        return False
    if text.isascii():  # without the tables of the codec, which every process would load
        return all(0 < len(label) < 64 for label in text.removesuffix(".").split(".")) or not text
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def _network_problem(text: str) -> str:
    """Why it is no trusted proxy; "" when it is."""
    if text == "unix":
        return ""
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        return f"{error}; expected an address (192.0.2.7), a network (10.0.0.0/8) or unix"
    return "every client would be believed; name the proxies' networks" if not network.prefixlen else ""


def _tls(config: Config) -> Iterator[Rule]:
    server = config.server
    if bool(server.tls_cert) != bool(server.tls_key):
        given, missing = ("tls_cert", "tls_key") if server.tls_cert else ("tls_key", "tls_cert")
        yield Rule(f"server.{missing}", "", f"missing; server.{given} needs it: set both, or neither for plain HTTP")

    if server.tls_cert and not server.host:
        yield Rule("server.tls_cert", repr(server.tls_cert), "there is no TLS on the Unix socket: set server.host too")
    if server.tls_client_ca and not server.tls_cert:
        yield Rule("server.tls_client_ca", repr(server.tls_client_ca), "needs TLS: set server.tls_cert and tls_key too")
    elif server.tls_client_ca and not server.unix_socket:
        reason = "commands of this home have no certificate and connect to server.unix_socket: set it too"
        yield Rule("server.tls_client_ca", repr(server.tls_client_ca), reason)


def _fleet_tls(config: Config) -> Iterator[Rule]:
    tls = config.fleet.tls
    given = [name for name in ("cert", "key", "ca") if getattr(tls, name)]
    if 0 < len(given) < 3:
        missing = next(name for name in ("cert", "key", "ca") if name not in given)
        yield Rule(f"fleet.tls.{missing}", "", f"missing; fleet.tls.{given[0]} needs it: set cert, key and ca, or none")
    elif not given and (tls.denied or tls.required):
        name = "denied" if tls.denied else "required"
        yield Rule(f"fleet.tls.{name}", repr(getattr(tls, name)), "needs TLS: set fleet.tls.cert, key and ca too")
    elif tls.denied and not tls.required:
        reason = "a denied host goes on without TLS, by the fleet's token, until fleet.tls.required is set"
        yield Rule("fleet.tls.denied", repr(tls.denied), f"{reason}: set that too, or leave denied empty")


def _tracing(config: Config) -> Iterator[Rule]:
    endpoint = config.tracing.otlp.endpoint
    if not endpoint:
        return
    if not endpoint.startswith(("http://", "https://")):
        yield Rule("tracing.otlp.endpoint", "", "expected an http:// or https:// URL, as http://127.0.0.1:4318")
    elif reason := _url_problem(endpoint, instead="OTEL_EXPORTER_OTLP_HEADERS"):
        yield Rule("tracing.otlp.endpoint", "", reason)


def _plugins(config: Config) -> Iterator[Rule]:
    names = [plugin.name for plugin in config.plugins]
    for index, plugin in enumerate(config.plugins):
        if plugin.name in names[:index]:
            yield Rule(f"plugins.{index}.name", plugin.name, "another plugin has the same name")
        try:
            object_of(plugin)
        except ConfigError as error:
            yield Rule(f"plugins.{index}.{error.param}", "", error.message)


def _fleet(config: Config) -> Iterator[Rule]:
    fleet = config.fleet
    for key, address in (
        ("fleet.blobs", fleet.blobs),
        *((f"fleet.mirrors.{i}", one) for i, one in enumerate(fleet.mirrors)),
    ):
        scheme = address.partition("://")[0] if "://" in address else ""
        if scheme not in _BLOB_SCHEMES or (not address and key != "fleet.blobs"):
            known = ", ".join(f"{one}://" for one in _BLOB_SCHEMES if one)
            yield Rule(key, repr(address), f"expected a directory or a URL of one of {known}")
        elif scheme and (reason := _url_problem(address, needs_host=scheme != "file")):
            yield Rule(key, "", reason)
    responses = fleet.orchestrator.responses
    scheme = responses.partition("://")[0] if "://" in responses else ""
    if scheme not in _BLOB_SCHEMES or scheme in ("http", "https"):
        yield Rule(
            "fleet.orchestrator.responses", repr(responses), "expected a directory, file://, s3://, gs:// or az://"
        )
    elif scheme and (reason := _url_problem(responses, needs_host=scheme != "file")):
        yield Rule("fleet.orchestrator.responses", "", reason)
    is_bucket = fleet.blobs.startswith("s3://")
    if fleet.blobs_endpoint and not fleet.blobs.startswith(("s3://", "az://")):
        yield Rule(
            "fleet.blobs_endpoint", "", "names a server for buckets: set fleet.blobs to s3://BUCKET or az://ACCOUNT too"
        )
    elif fleet.blobs_endpoint and not fleet.blobs_endpoint.startswith(("http://", "https://")):
        yield Rule("fleet.blobs_endpoint", repr(fleet.blobs_endpoint), "expected an http:// or https:// URL")
    elif fleet.blobs_endpoint and (reason := _url_problem(fleet.blobs_endpoint)):
        yield Rule("fleet.blobs_endpoint", "", reason)
    if fleet.blobs_region and not (is_bucket and re.fullmatch(r"[a-z0-9-]{1,64}", fleet.blobs_region)):
        yield Rule(
            "fleet.blobs_region", repr(fleet.blobs_region), "expected the region of an s3:// bucket, as eu-west-1"
        )

    if reason := _store_problem(fleet.store):
        yield Rule("fleet.store", repr(fleet.store), reason)
    for key, host in (("host", fleet.agent.host), ("advertise", fleet.agent.advertise)):
        if (not host and key == "host") or not _may_be_host(host) or any(c in "/@" for c in host):
            yield Rule(f"fleet.agent.{key}", repr(host), "expected a host name or an address, without a port")
    if fleet.agent.id and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fleet.agent.id):
        reason = "expected up to 63 letters, digits, dots, dashes and underscores, the first a letter or digit"
        yield Rule("fleet.agent.id", repr(fleet.agent.id), reason)
    for key, value, reason in engine_rules.problems(config, check_name):
        yield Rule(key, value, reason)
    if not fleet.orchestrator.host or not _may_be_host(fleet.orchestrator.host):
        yield Rule("fleet.orchestrator.host", repr(fleet.orchestrator.host), "expected a host name or an address")
    if fleet.agent.host in ("0.0.0.0", "::") and not fleet.agent.advertise:
        reason = "listens on every address, so orchestrators need one: set fleet.agent.advertise"
        yield Rule("fleet.agent.host", repr(fleet.agent.host), reason)
    for key, name, most in (
        ("namespace", fleet.kubernetes.namespace, 63),
        ("release", fleet.kubernetes.release, 40),  # names of objects are longer, and have 63 characters at most
    ):
        if len(name) > most or not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name):
            reason = f"expected a letter, and up to {most - 1} more lower-case letters, digits and inner dashes"
            yield Rule(f"fleet.kubernetes.{key}", repr(name), reason)
    if fleet.kubernetes.context.startswith("-"):  # helm and kubectl would take it for an option
        yield Rule(
            "fleet.kubernetes.context", repr(fleet.kubernetes.context), "expected a name without a dash in front"
        )


def _on_demand(config: Config) -> Iterator[Rule]:
    times: list[tuple[str, int | str]] = [("on_demand.keep_alive", config.on_demand.keep_alive)]
    times += [(f"models.{i}.keep_alive", one.keep_alive) for i, one in enumerate(config.models) if one.keep_alive != ""]
    for key, value in times:
        try:
            seconds_of(value)
        except ValueError:
            yield Rule(key, repr(value), f"expected {FORM}")
    if config.on_demand.max_waiting_per_tenant > config.on_demand.max_waiting:
        reason = f"more than on_demand.max_waiting = {config.on_demand.max_waiting}, which bounds all tenants together"
        yield Rule("on_demand.max_waiting_per_tenant", str(config.on_demand.max_waiting_per_tenant), reason)


def _store_problem(address: str) -> str:
    """Why it is not the address of a coordination store; "" when it is."""
    if not address or (address.startswith("sqlite:") and address != "sqlite:"):
        return ""
    scheme = address.partition("://")[0]
    if scheme not in ("etcd", "redis") or "://" not in address:
        return "expected sqlite:PATH, etcd://HOST:PORT or redis://HOST:PORT"
    try:
        url = urlsplit(address)
        is_complete = bool(url.hostname and url.port)
    except ValueError as error:
        return f"not a URL: {error}"
    if not is_complete or url.username is not None or url.query or url.fragment:
        return f"expected {scheme}://HOST:PORT or {scheme}://HOST:PORT/NAMESPACE"
    if not re.fullmatch(r"(/[A-Za-z0-9._-]{1,64})?/?", url.path):
        return "expected a namespace of up to 64 letters, digits and . _ -"
    return ""


def _url_problem(address: str, needs_host: bool = True, instead: str = "the environment variables of the store") -> str:
    """Why a URL cannot be used; "" when it can. The address itself is not shown: it may hold a password.

    `instead`: where credentials belong.
    """
    try:
        url = urlsplit(address)
        _ = url.port  # raises for a wrong one
    except ValueError as error:
        return f"not a URL: {error}"
    if needs_host and not url.hostname:
        return "the URL names no host or bucket"
    if url.username is not None or url.password is not None:
        return f"the URL contains credentials, which would be in logs; use {instead}"
    return "expected a URL without query and fragment: keys are appended" if url.query or url.fragment else ""
