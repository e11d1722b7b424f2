"""One configuration: file, then environment, checked as a whole, frozen.

Lowest to highest: the defaults of `config_schema.py`; one YAML or TOML file; `LLM_ENGINE_*` names;
`STARLING_SECTION__KEY` (`STARLING_MODELS__0__PATH` for lists, the next index appends).  The file is
the one asked for, else $STARLING_CONFIG, else starling.yaml, .yml or .toml in the working
directory, else configs/default.yaml beside the package, else none.

Whatever is wrong is reported at once, one line for each problem, with the dotted key, the value,
where it was set, the bound and what to do.  Creates nothing and opens nothing but that file.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import yaml

from pipeline.config_rules import check_rules
from pipeline.config_schema import DEMO_MODEL, ApiKey, Config, ModelConfig, Section, mask
from pipeline.errors import ConfigError

__all__ = ["Config", "ModelConfig", "find_file", "load", "render"]

PREFIX = "STARLING_"
ALIAS_PREFIX = "LLM_ENGINE_"
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
MODEL_ALIASES = {"model_path": "path", "threads": "ranks", "context": "max_sequence_length"}
FILE_NAMES = ("starling.yaml", "starling.yml", "starling.toml")
FILE_BYTES_MAX = 1 << 20

_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "keys",
    "null": "nothing",
}

Env = Mapping[str, str]
Key = tuple[str, ...]  # ("models", "0", "path")


class Problem(NamedTuple):
    key: str  # dotted
    text: str  # after the key: value, reason, what to do


def find_file(path: str | Path | None = None, env: Env = os.environ, cwd: Path | None = None) -> Path | None:
    """The configuration file that `load` reads; None when there is none."""
    asked = path or env.get("STARLING_CONFIG")
    if asked:
        return Path(asked).expanduser()
    here = cwd or Path.cwd()
    shipped = Path(__file__).resolve().parent.parent / "configs" / "default.yaml"
    candidates = [here / name for name in FILE_NAMES] + [shipped]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def load(path: str | Path | None = None, env: Env = os.environ, cwd: Path | None = None) -> Config:
    """The resolved configuration. Raises `ConfigError` that lists every problem."""
    file = find_file(path, env, cwd)
    return resolve(read_file(file) if file else {}, env, f"the configuration ({file or 'defaults'})")


def resolve(raw: dict[str, Any], env: Env, source: str = "the configuration") -> Config:
    """`raw` (as a file would give it) and the environment, merged and checked."""
    problems: list[Problem] = []
    _drop_empty(raw)
    _normalise(raw, problems)
    origins = _apply_env(raw, env, problems)
    for model in raw["models"] if isinstance(raw.get("models"), list) else ():
        _name_model(model)
    if not raw.get("models"):
        raw["models"] = [{"name": DEMO_MODEL}]
    _normalise_keys(raw)
    _check_type(Config, raw, (), origins, problems)
    if not problems:
        config = msgspec.convert(raw, Config)
        for key, value, reason in check_rules(config):
            shown = f" = {value}" if value else ""
            problems.append(Problem(key, f"{shown}{_origin(tuple(key.split('.')), origins)}: {reason}"))
        if not problems:
            return config
    lines = "\n".join(f"  {problem.key}{problem.text}" for problem in problems)
    raise ConfigError(f"{source} cannot be used:\n{lines}", param=problems[0].key)


def render(config: Config, style: Literal["yaml", "json"] = "yaml") -> str:
    """The configuration as it can be shown: API keys are masked."""
    plain = msgspec.to_builtins(config)
    for key in plain["auth"]["api_keys"]:
        key["key"] = mask(key["key"])
    if style == "json":
        return msgspec.json.format(msgspec.json.encode(plain)).decode() + "\n"
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)


# ------------------------------------------------------------------ the file


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML would silently take the last one)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, Hashable) else None)
        return super().construct_mapping(node, deep)


def read_file(path: Path) -> dict[str, Any]:
    """A YAML or TOML (by its suffix) mapping. Raises `ConfigError` with the place of the mistake."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes; this is no configuration")
    try:
        text = data.decode("utf-8")
        if path.suffix == ".toml":
            parsed: Any = tomllib.loads(text)
        else:
            parsed = yaml.load(text, _StrictLoader)  # a SafeLoader
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: expected sections (server:, models:, ...), got {_kind(parsed)}")
    return parsed


def _drop_empty(raw: dict[str, Any]) -> None:
    """A section whose keys are all commented out (`server:` and nothing) is as good as absent."""
    for name in [name for name, value in raw.items() if value is None]:
        del raw[name]


def _normalise(raw: dict[str, Any], problems: list[Problem]) -> None:
    """One model or several become `models`; other names of a model's keys become the usual ones."""
    if "model" in raw:
        model = raw.pop("model")
        if "models" in raw:
            problems.append(Problem("model", ": given beside models; put it into the list"))
        else:
            raw["models"] = [model]
    for index, model in enumerate(raw["models"] if isinstance(raw.get("models"), list) else ()):
        if not isinstance(model, dict):
            continue
        for alias, name in MODEL_ALIASES.items():
            if alias not in model:
                continue
            if name in model:
                problems.append(
                    Problem(f"models.{index}.{alias}", f": the same as {name}, which is given too; drop one")
                )
            model.setdefault(name, model.pop(alias))


def _name_model(model: Any) -> None:
    """A model that only has a path is called after its file."""
    if isinstance(model, dict) and "name" not in model and isinstance(model.get("path"), str):
        stem = model["path"].rstrip("/").rsplit("/", 1)[-1]
        model["name"] = stem.removesuffix(".gguf") or DEMO_MODEL


def _normalise_keys(raw: dict[str, Any]) -> None:
    """`api_keys` may hold plain strings; edges may be written with underscores."""
    auth = raw.get("auth")
    if isinstance(auth, dict) and isinstance(auth.get("api_keys"), list):
        auth["api_keys"] = [{"key": key} if isinstance(key, str) else key for key in auth["api_keys"]]
    if isinstance(raw.get("edges"), dict):
        raw["edges"] = {
            name.replace("_", "-") if isinstance(name, str) else name: address
            for name, address in raw["edges"].items()
        }


# ------------------------------------------------------------------ the environment


def _apply_env(raw: dict[str, Any], env: Env, problems: list[Problem]) -> dict[Key, str]:
    """Set every override in `raw`; returns which variable set which key."""
    origins: dict[Key, str] = {}
    for variable in sorted(name for name in env if name.startswith(ALIAS_PREFIX)):
        if variable not in ALIASES:
            problems.append(Problem(variable, ": no such setting" + _did_you_mean(variable, ALIASES)))
            continue
        _set(raw, tuple(ALIASES[variable].split(".")), env[variable], variable, origins, problems)
    sections = {name.upper() for name in _fields(Config)} | {"MODEL"}
    # Numeric parts in numeric order, so that __10__ is appended after __9__.
    for variable in sorted(
        (name for name in env if name.startswith(PREFIX)),
        key=lambda name: [(part.isdigit(), part.zfill(6)) for part in name.split("__")],
    ):
        parts = variable.removeprefix(PREFIX).split("__")
        if len(parts) == 1:
            # STARLING_HOME and the like are no settings, but STARLING_SERVER_PORT is a typo of one.
            section = next((s for s in sorted(sections) if f"{parts[0]}_".startswith(s + "_")), "")
            if section:
                meant = f"{PREFIX}{section}__{parts[0][len(section) + 1 :] or 'KEY'}"
                problems.append(Problem(variable, f": no such setting; did you mean {meant}?"))
            continue
        key = tuple(part.lower() for part in parts)
        if key[0] == "model":
            key = ("models", "0", *key[1:])
        if key[0] == "models" and len(key) == 3:
            key = (*key[:2], MODEL_ALIASES.get(key[2], key[2]))
        _set(raw, key, env[variable], variable, origins, problems)
    return origins


def _set(
    raw: dict[str, Any], key: Key, text: str, variable: str, origins: dict[Key, str], problems: list[Problem]
) -> None:
    """`raw[key] = text`, read as the type that the schema has for the key."""
    node: Any = raw
    kind: Any = Config
    for depth, part in enumerate(key):
        last = depth == len(key) - 1
        if _is_section(kind):
            kind = _fields(kind).get(part)
        elif kind is not None and get_origin(kind) is dict:
            kind = get_args(kind)[1]
            part = part.replace("_", "-") if key[0] == "edges" else part
        elif kind is not None and get_origin(kind) is tuple:
            kind = get_args(kind)[0]
            if not part.isdigit() or not isinstance(node, list) or int(part) > len(node):
                held = len(node) if isinstance(node, list) else 0
                problems.append(
                    Problem(".".join(key), f" ({variable}): expected an index from 0 to {held}, got {part!r}")
                )
                return
            if int(part) == len(node):
                node.append({} if not last else None)
            if last:
                node[int(part)] = _parse(text, kind)
            elif isinstance(node[int(part)], str):  # a plain API key
                node[int(part)] = {"key": node[int(part)]}
            node = node[int(part)]
            continue
        else:
            kind = None
        if not isinstance(node, dict):
            problems.append(Problem(".".join(key), f" ({variable}): there is no such setting"))
            return
        if last:
            node[part] = _parse(text, kind)
        else:
            empty: Any = [] if kind is not None and get_origin(kind) is tuple else {}
            if node.get(part) is None:
                node[part] = empty
            node = node[part]
    origins[key] = variable


def _parse(text: str, kind: Any) -> Any:
    """Text of an environment variable as a value of `kind`; what does not fit is refused later."""
    bare = _bare(kind)
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
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text


# ------------------------------------------------------------------ checking


def _check_type(kind: Any, value: Any, key: Key, origins: dict[Key, str], problems: list[Problem]) -> None:
    """Collect what does not fit: unknown and missing keys, wrong types, values out of bounds."""
    if _is_section(kind):
        if not isinstance(value, dict):
            reason = f"expected keys ({', '.join(_fields(kind))}), got {_kind(value)}"
            _refuse(key, value, reason, origins, problems)
            return
        fields = _fields(kind)
        for name in value:
            if name not in fields:
                text = f"{_origin((*key, str(name)), origins)}: no such key"
                problems.append(Problem(".".join((*key, str(name))), text + _hint(str(name), fields)))
            else:
                _check_type(fields[name], value[name], (*key, name), origins, problems)
        for field in msgspec.structs.fields(kind):
            if field.required and field.name not in value:
                problems.append(Problem(".".join((*key, field.name)), ": missing; give it a value"))
    elif get_origin(kind) is tuple and isinstance(value, list):
        for index, item in enumerate(value):
            _check_type(get_args(kind)[0], item, (*key, str(index)), origins, problems)
    elif get_origin(kind) is dict and isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                _refuse((*key, str(name)), item, "the key must be text; put it in quotes", origins, problems)
            else:
                _check_type(get_args(kind)[1], item, (*key, name), origins, problems)
    else:
        try:
            converted = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            _refuse(key, value, _reason(str(error), kind, value), origins, problems)
            return
        if isinstance(converted, float) and converted != converted:
            _refuse(key, value, "expected a number", origins, problems)


def _reason(message: str, kind: Any, value: Any) -> str:
    """msgspec's message in the words of this file."""
    if get_origin(kind) is Literal:
        allowed = [str(choice) for choice in get_args(kind)]
        return f"expected one of {', '.join(allowed)}" + _did_you_mean(str(value), allowed)
    text = message.split(" - at ")[0].replace("Expected", "expected")
    text = text.replace(" >= ", " of at least ").replace(" <= ", " of at most ")
    return re.sub("`([^`]+)`", lambda quoted: _TYPE_WORDS.get(quoted[1], quoted[1]), text)


def _refuse(key: Key, value: Any, reason: str, origins: dict[Key, str], problems: list[Problem]) -> None:
    shown = "***" if key[:2] == ("auth", "api_keys") else repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    problems.append(Problem(".".join(key), f" = {shown}{_origin(key, origins)}: {reason}"))


def _origin(key: Key, origins: dict[Key, str]) -> str:
    """Which variable set the key, something in it, or the list or section that it is in."""
    below = next((variable for other, variable in origins.items() if other[: len(key)] == key), "")
    if below:
        return f" ({below})"
    while key:
        if key in origins:
            return f" ({origins[key]})"
        key = key[:-1]
    return ""


def _hint(name: str, fields: Mapping[str, Any]) -> str:
    """A neighbour of the name, or the section that has it."""
    near = _did_you_mean(name, fields)
    if near:
        return near
    homes = [section for section, kind in _fields(Config).items() if name in _fields(_element(kind))]
    if homes:
        return f"; it belongs to {' or '.join(homes)}"
    return f"; there are {', '.join(fields)}"


def _did_you_mean(word: str, known: Mapping[str, Any] | list[str]) -> str:
    near = difflib.get_close_matches(word.lower(), {name.lower(): name for name in known}, n=1, cutoff=0.7)
    return f"; did you mean {next(n for n in known if n.lower() == near[0])}?" if near else ""


def _fields(kind: Any) -> dict[str, Any]:
    """Name to type of a section's keys, in order; empty for what is no section."""
    return {f.name: f.type for f in msgspec.structs.fields(kind)} if _is_section(kind) else {}


def _element(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is tuple else kind


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _bare(kind: Any) -> Any:
    """The type without its bounds."""
    return get_args(kind)[0] if hasattr(kind, "__metadata__") else kind


def _kind(value: Any) -> str:
    names = {dict: "keys", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)
