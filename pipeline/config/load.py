"""The resolved configuration: file, then environment, checked as a whole, frozen.

    file.py    reads the YAML or TOML file into plain values
    env.py     sets overrides from environment variables
    check.py   compares the values with schema.py: types, bounds, unknown keys
    rules.py   checks what types cannot express

The file is the one requested, else $STARLING_CONFIG, else starling.yaml, .yml or .toml in the working directory, else
configs/default.yaml beside the package, else none.  All problems are reported at once, one line each, with the
dotted key, the value, where it was set, the bound and the remedy.  Creates nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from pipeline.config.check import Findings, check, printable
from pipeline.config.env import apply_environment
from pipeline.config.file import complete, gather_models, read_file
from pipeline.config.paths import pulled_names
from pipeline.config.rules import check_rules
from pipeline.config.schema import Config, mask
from pipeline.config.user_home import expand_user
from pipeline.errors import ConfigError

FILE_NAMES = ("starling.yaml", "starling.yml", "starling.toml")

Env = Mapping[str, str]


def find_file(path: str | Path | None = None, env: Env = os.environ, cwd: Path | None = None) -> Path | None:
    """The configuration file that `load` reads; None when there is none."""
    asked = path or env.get("STARLING_CONFIG")
    if asked:
        return expand_user(asked, env)
    shipped = Path(__file__).resolve().parents[2] / "configs" / "default.yaml"
    candidates = [*_in_working_directory(cwd), shipped]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _in_working_directory(cwd: Path | None) -> list[Path]:
    """Where files may be in the working directory; nowhere if that has been deleted."""
    try:
        here = cwd or Path.cwd()
    except FileNotFoundError:
        return []
    return [here / name for name in FILE_NAMES]


def load(path: str | Path | None = None, env: Env = os.environ, cwd: Path | None = None) -> Config:
    """The resolved configuration. Raises `ConfigError` that lists every problem."""
    file = find_file(path, env, cwd)
    return resolve(read_file(file) if file else {}, env, f"the configuration ({file or 'defaults'})")


def resolve(raw: dict[str, Any], env: Env, source: str = "the configuration") -> Config:
    """Merge and check `raw` (the contents of a file; it is changed) and the environment. Raises `ConfigError`."""
    findings = Findings()
    gather_models(raw, findings)
    apply_environment(raw, env, findings)
    complete(raw)
    check(Config, raw, (), findings)
    if not findings.problems:
        config = msgspec.convert(raw, Config)
        for rule in check_rules(config, pulled_names(env)):
            findings.add(tuple(rule.key.split(".")), rule.reason, rule.value)
        if not findings.problems:
            return config
    lines = "\n".join(f"  {problem}" for problem in findings.problems)
    raise ConfigError(printable(f"{source} cannot be used:\n{lines}"), param=printable(findings.problems[0].key))


def render(config: Config, style: Literal["yaml", "json"] = "yaml") -> str:
    """The configuration as text, with API keys masked."""
    plain = msgspec.to_builtins(config)
    for key in plain["auth"]["api_keys"]:
        key["key"] = mask(key["key"])
    if style == "json":
        return msgspec.json.format(msgspec.json.encode(plain)).decode() + "\n"
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)
