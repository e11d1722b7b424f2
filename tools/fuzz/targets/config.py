"""Configuration: files in YAML and TOML, and environment variables.

byte 0   the form: 0 YAML, 1 TOML, 2 lines NAME=VALUE of environment variables (modulo 3)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from pipeline.config import load as loader
from pipeline.config.file import read_file
from pipeline.errors import ConfigError
from tools.fuzz.parts import written
from tools.fuzz.target import Target

DEFAULT = Path(__file__).resolve().parents[3] / "configs" / "default.yaml"
SUFFIXES = (".yaml", ".toml", ".env")


def run(data: bytes) -> None:
    """Resolve the configuration; what is printed of it resolves to the same."""
    try:
        _resolve(data)
    except ConfigError as error:
        error.message.encode()
        raise


def _resolve(data: bytes) -> None:
    form, text = (data[:1] or b"\0")[0] % 3, data[1:]
    if form == 2:
        lines = text.decode("utf-8", "surrogateescape").split("\n")
        env = {name: value for name, found, value in (line.partition("=") for line in lines) if found and name}
        config = loader.resolve({}, env)
    else:
        config = loader.resolve(read_file(written(f"config{SUFFIXES[form]}", text)), {})
    printed = loader.render(config, "json")
    if not config.auth.api_keys:  # they are masked
        assert loader.resolve(msgspec.json.decode(printed), {}) == config


def seeds() -> Iterator[bytes]:
    """Sections of the default configuration, both notations of models, and variables."""
    text = DEFAULT.read_text()
    sections, section = [], ""
    for line in text.splitlines(keepends=True):
        if line.strip().startswith("#"):
            continue
        if line[:1].isalpha() and section:
            sections.append(section)
            section = ""
        section += line
    yield from (b"\0" + text.encode() for text in [*sections, section])
    yield b"\0models: [{name: a, path: b.gguf, ranks: 2}]\nauth: {api_keys: [k1, {key: k2, tenant: t}]}\n"
    yield b"\0model: &m\n  model_path: a.gguf\n  threads: 1\n  context: 512\n"
    yield b"\0edges: {gateway_kv: 'ipc:///tmp/x'}\n"
    yield b'\1[server]\nport = 8000\n[[models]]\nname = "m"\npath = "a.gguf"\n'
    yield b"\2STARLING_SERVER__PORT=8001\nSTARLING_MODELS__0__NAME=m\nLLM_ENGINE_PORT=1\n"


TARGET = Target(
    run,
    seeds,
    errors=(ConfigError,),
    modules=(
        "pipeline.config.check",
        "pipeline.config.env",
        "pipeline.config.file",
        "pipeline.config.load",
        "pipeline.config.rules",
    ),
    max_bytes=2048,
)
