"""Reads a configuration file, YAML or TOML, into plain values of the schema's shape.

Both notations of models (`model:` and `models:`) and the aliases of their keys are unified here.

A process keeps the values of the last file: `starling up` reads the configuration more than once, each supervisor that
it forks reads it again, and PyYAML takes 20 ms for the default file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import tomllib
from collections.abc import Hashable
from pathlib import Path
from typing import Any, get_args

import yaml

from pipeline.config.check import Findings, fields_of, kind_of, printable
from pipeline.config.schema import DEMO_MODEL, LoggingConfig
from pipeline.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
VALUES_MAX = 100_000  # in a file or a variable
DEPTH_MAX = 16
_last: tuple[str, bytes, Any] | None = None  # suffix and contents of the last file without a mistake, and its values
MODEL_ALIASES = {
    "model_path": "path",
    "threads": "ranks",
    "context": "max_sequence_length",
    "max_memory_mb": "kv_cache_mb",
}
LEVEL_ALIASES = {"warn": "warning", "trace": "debug"}  # of other programs; debug is the most that is logged


class _DuplicateKey(yaml.MarkedYAMLError):
    """Its problem may be shown: it quotes a key, and no value."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys (YAML would silently use the last one)."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As the base class; whatever that raises for a value like `!!int x` has the position, and not the value."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(problem=f"a value is no valid {kind}", problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """As the base class; raises on a duplicate key."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise _DuplicateKey(problem=f"{key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key if isinstance(key, Hashable) else None)
        return super().construct_mapping(node, deep)


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or TOML file (by its suffix). Raises `ConfigError` with the position of the mistake."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes; this is no configuration")
    global _last
    last = _last  # other threads may replace it
    if last is not None and last[:2] == (path.suffix, data):
        return copy.deepcopy(last[2])  # the caller changes it
    is_toml = path.suffix == ".toml"
    try:
        text = data.decode("utf-8")
        parsed: Any = tomllib.loads(text) if is_toml else _load_yaml(text, path.suffix == ".json")
        check_size(parsed)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from None
    except Exception as error:
        raise ConfigError(printable(f"{path}: not {'TOML' if is_toml else 'YAML'}: {_reason(error)}")) from None
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: expected sections (server:, models:, ...), got {kind_of(parsed)}")
    _last = path.suffix, data, copy.deepcopy(parsed)
    return parsed


def _reason(error: Exception) -> str:
    """What is wrong, and where. No line of the file is quoted, and no value: both may be secrets."""
    if isinstance(error, yaml.MarkedYAMLError):
        problem, mark = str(error.problem), error.problem_mark or error.context_mark
        is_quoting = isinstance(error, yaml.composer.ComposerError | yaml.constructor.ConstructorError)
        if is_quoting or "tag handle" in problem:  # `key: *word` and `key: !word` are an alias and a tag
            problem = re.split("['\"]", f"{error.context}: {problem}" if error.context else problem)[0].strip()
        elif error.context:
            problem = f"{error.context}: {problem}"
        return problem + (f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else "")
    if isinstance(error, yaml.reader.ReaderError):
        return f"a character is not allowed (position {error.position})"
    if isinstance(error, tomllib.TOMLDecodeError | TooLarge):
        return str(error)
    return "nested too deep" if isinstance(error, RecursionError) else type(error).__name__


def _load_yaml(text: str, is_json: bool) -> Any:
    """`is_json`: most likely JSON, which every YAML parser reads, and that of Python in a hundredth of the time."""
    if is_json:
        with contextlib.suppress(ValueError, RecursionError):  # then the message is that for YAML
            return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    return yaml.load(text, _StrictLoader)  # a SafeLoader


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


class TooLarge(ValueError):
    """The values of a file or a variable are too many, or nested too deep."""


def check_size(parsed: Any) -> None:
    """Raises `TooLarge` for more values or a deeper nesting than a configuration needs.

    A value counts wherever it is used: anchors of YAML can make a few lines mean billions of values, or contain
    themselves.
    """
    level, count = [parsed], 0
    for _ in range(DEPTH_MAX):
        level = [value for value in level if isinstance(value, dict | list)]
        count += sum(map(len, level))
        if count > VALUES_MAX:
            raise TooLarge(f"more than {VALUES_MAX:,} values; each use of an anchor counts")
        level = [item for value in level for item in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    raise TooLarge(f"nested more than {DEPTH_MAX} deep; a configuration has 4 levels")


def gather_models(raw: dict[str, Any], findings: Findings) -> None:
    """Turn `model` into `models`, and replace aliases of a model's keys.

    Removes sections without keys (`server:` with all keys commented out).
    """
    for name in [name for name, value in raw.items() if value is None]:
        del raw[name]
    if "model" in raw:
        model = raw.pop("model")
        if "models" in raw:
            findings.add(("model",), "given beside models; put it into the list")
        else:
            raw["models"] = [model]
    for index, model in enumerate(raw["models"] if isinstance(raw.get("models"), list) else ()):
        for alias, name in MODEL_ALIASES.items() if isinstance(model, dict) else ():
            if alias not in model:
                continue
            if name in model:
                reason = f"the same as {name}, which is given too; drop one"
                findings.add(("models", str(index), alias), reason)
            model.setdefault(name, model.pop(alias))


def level_named(text: str) -> str:
    """The log level that is meant: in any case, or under the name that other programs have for it; else the text."""
    level = text.strip().lower()
    level = LEVEL_ALIASES.get(level, level)
    return level if level in get_args(fields_of(LoggingConfig)["level"]) else text


def complete(raw: dict[str, Any]) -> None:
    """Complete short forms: missing model names, API keys given as text, edge names with underscores, log levels."""
    if not raw.get("models"):
        raw["models"] = [{"name": DEMO_MODEL}]
    for model in raw["models"] if isinstance(raw["models"], list) else ():
        if not isinstance(model, dict) or "name" in model:
            continue
        path = model.get("path", "")
        if isinstance(path, str):
            # A model without a name is named after its file; without a path it is the demo model.
            model["name"] = path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf") or DEMO_MODEL
    logging = raw.get("logging")
    if isinstance(logging, dict) and isinstance(logging.get("level"), str):
        logging["level"] = level_named(logging["level"])
    auth = raw.get("auth")
    if isinstance(auth, dict) and isinstance(auth.get("api_keys"), list):
        auth["api_keys"] = [{"key": key} if isinstance(key, str) else key for key in auth["api_keys"]]
    if isinstance(raw.get("edges"), dict):
        raw["edges"] = {
            name.replace("_", "-") if isinstance(name, str) else name: address for name, address in raw["edges"].items()
        }
