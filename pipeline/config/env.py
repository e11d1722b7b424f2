"""Settings from environment variables, written into the plain values of a configuration.

    STARLING_SERVER__PORT=9000              one key
    STARLING_MODELS__0__PATH=/m/a.gguf      an item of a list by its index; the next free index appends
    STARLING_MODEL__PATH=/m/a.gguf          the same: the first model
    STARLING_AUTH__API_KEYS=sk-one,sk-two   a list of simple values; or JSON
    LLM_ENGINE_PORT=9000                    names of another engine, see ALIASES

A name without a double underscore (STARLING_HOME) is not a setting; if it looks like a typo of one, it is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import yaml

from pipeline.config.check import Findings, Key, did_you_mean, fields_of, is_section
from pipeline.config.file import MODEL_ALIASES, check_size
from pipeline.config.schema import ApiKey, Config

PREFIX = "STARLING_"
ALIAS_PREFIX = "LLM_ENGINE_"
INDEX_DIGITS = 6  # of an item of a list
ALIASES = {
    "LLM_ENGINE_HOST": "server.host",
    "LLM_ENGINE_PORT": "server.port",
    "LLM_ENGINE_API_KEY": "auth.api_keys.0",
    "LLM_ENGINE_MODEL_PATH": "models.0.path",
    "LLM_ENGINE_DEVICE": "models.0.device",
    "LLM_ENGINE_MAX_SEQUENCE_LENGTH": "models.0.max_sequence_length",
    "LLM_ENGINE_CACHE_ENABLED": "cache.enabled",
    "LLM_ENGINE_CACHE_SIZE_MB": "cache.max_size_mb",
    "LLM_ENGINE_LOG_LEVEL": "logging.level",
}


def apply_environment(raw: dict[str, Any], env: Mapping[str, str], findings: Findings) -> None:
    """Set every override in `raw`, aliases first, and record in `findings.origins` which variable set which key."""
    for variable in sorted(name for name in env if name.startswith(ALIAS_PREFIX)):
        if variable in ALIASES:
            _set(raw, tuple(ALIASES[variable].split(".")), env[variable], variable, findings)
        else:
            findings.add((variable,), "no such setting" + did_you_mean(variable, ALIASES))
    for variable in sorted((name for name in env if name.startswith(PREFIX)), key=_numeric_order):
        parts = variable.removeprefix(PREFIX).split("__")
        if len(parts) == 1:
            _check_typo(variable, parts[0], findings)
            continue
        key = tuple(part.lower() for part in parts)
        if key[0] == "model":
            key = ("models", "0", *key[1:])
        if key[0] == "models" and len(key) == 3:
            key = (*key[:2], MODEL_ALIASES.get(key[2], key[2]))
        _set(raw, key, env[variable], variable, findings)


def _numeric_order(variable: str) -> list[tuple[bool, str]]:
    """Sort key by which __10__ comes after __9__."""
    return [(part.isdigit(), part.zfill(6)) for part in variable.split("__")]


def _check_typo(variable: str, name: str, findings: Findings) -> None:
    """Report STARLING_SERVER_PORT, which should be STARLING_SERVER__PORT."""
    for section in sorted({section.upper() for section in fields_of(Config)} | {"MODEL"}):
        if f"{name}_".startswith(f"{section}_"):
            meant = f"{PREFIX}{section}__{name[len(section) + 1 :] or 'KEY'}"
            findings.add((variable,), f"no such setting; did you mean {meant}?")
            return


def _set(raw: dict[str, Any], key: Key, text: str, variable: str, findings: Findings) -> None:
    """`raw[key] = text`, parsed as the key's type in the schema; the check reports unknown keys."""
    findings.origins[key] = variable
    if key == ("auth", "api_keys") and not text.replace(",", " ").strip():
        # An unset variable in a compose file arrives so, and would open a server whose file has keys.
        findings.add(key, "names no key; unset the variable, or set it to [] to serve everybody without a key")
        return
    node: Any = raw
    kind: Any = Config
    for depth, part in enumerate(key):
        is_last = depth == len(key) - 1
        is_list = get_origin(kind) is tuple
        place: Any = part
        if is_section(kind):
            kind = fields_of(kind).get(part)
        elif is_list:
            held = len(node) if isinstance(node, list) else 0
            if not part.isdecimal() or len(part) > INDEX_DIGITS or int(part) > held or not isinstance(node, list):
                findings.add(key, f"expected an index from 0 to {held}, got {part!r}")
                return
            place, kind = int(part), get_args(kind)[0]
            if place == held:
                node.append(None)
        elif get_origin(kind) is dict:
            place = part.replace("_", "-") if key[0] == "edges" else part
            kind = get_args(kind)[1]
        else:
            kind = None
        if not is_list and not isinstance(node, dict):
            findings.add(key, "there is no such setting")
            return
        if is_last:
            node[place] = _parse(text, kind)
            return
        inner = node[place] if is_list else node.get(place)
        if inner is None:
            inner = [] if get_origin(kind) is tuple else {}
        elif kind is ApiKey and isinstance(inner, str):
            inner = {"key": inner}
        node[place] = node = inner


def _parse(text: str, kind: Any) -> Any:
    """The text as a value of `kind`; the check reports values that do not fit."""
    bare = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind  # without its bounds
    if bare is str or (get_origin(bare) is Literal and all(isinstance(a, str) for a in get_args(bare))):
        return text
    if bare is ApiKey and not text.lstrip().startswith("{"):
        return text
    if get_origin(bare) is tuple and not text.lstrip().startswith("["):
        element = get_args(bare)[0]
        return [_parse(part.strip(), element) for part in text.split(",") if part.strip()]
    if bare is bool and text.strip() in ("0", "1"):
        return text.strip() == "1"
    try:
        parsed = yaml.safe_load(text)
        check_size(parsed)
    except Exception:  # PyYAML raises almost any for values like `!!int ""`
        return text
    return parsed
