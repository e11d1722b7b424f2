"""The files of a support bundle: what a helper needs to see, bounded, with secrets removed.

Never included: prompts and answers (the journal, sessions, KV pages, what plugins print), model files, keys, and the
texts of plugins' options, which may be credentials under any name.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import re
import socket
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipeline.api import key_file
from pipeline.config import paths
from pipeline.config.load import load, render
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.fleet import token
from shm.decoding import DECODE_ERRORS
from starling.support.redaction import MASK, Redaction

Part = tuple[str, Callable[[], str]]
_TENANT = re.compile(r'"tenant": ?"([A-Za-z0-9._@-]{1,64})"')  # in a line of a log
_OF_ALL = {"", "default", "all", "other"}  # stand for no tenant in particular
_PLUGIN = '"plugin": '  # in a line of a log
_LEAST_OPTION = 8  # characters of an option that is replaced everywhere; shorter ones are words, too
_SECRET_VARIABLES = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def collect(log_bytes: int) -> dict[str, bytes]:
    """The files by name. A part that cannot be read becomes a text that says why.

    `log_bytes`: most of each log file, from its end.
    """
    try:
        config: Config | None = load()
    except ConfigError as error:
        config, problem = None, error.message
    parts: list[Part] = [("machine.json", _machine), ("doctor.json", _doctor)]
    if config is None:
        parts.append(("configuration.txt", lambda: problem))
    else:
        parts += _parts_of(config)
    parts += list(_logs(log_bytes))
    texts = {name: _read(read) for name, read in parts}
    redaction = _redaction(config, texts)
    return {name: redaction.text(text).encode() for name, text in texts.items()}


def pack(files: dict[str, bytes], now: float) -> bytes:
    """A .tar.gz with the files in a folder of their own. `now`: s since 1970."""
    target = io.BytesIO()
    folder = time.strftime("starling-support-%Y%m%d-%H%M%S", time.gmtime(now))
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mtime, info.mode = len(data), int(now), 0o600
            archive.addfile(info, io.BytesIO(data))
    return target.getvalue()


def _read(read: Callable[[], str]) -> str:
    try:
        return read()
    except Exception as error:  # whatever is broken is what the bundle is for
        return f"could not be read: {type(error).__name__}: {error}\n"


# ------------------------------------------------------------------ parts


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"


def _machine() -> str:
    from importlib.metadata import version

    names = ("starling", "numba", "llvmlite", "numpy", "pyzmq", "msgspec", "aiohttp", "tokenizers", "llguidance")
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model name", "flags"))]
    return _json(
        {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {name: version(name) for name in names},
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cpu": cpu[:2],
            "cores": len(os.sched_getaffinity(0)),
            "memory": Path("/proc/meminfo").read_text().splitlines()[:3],
        }
    )


def _doctor() -> str:
    from starling.cli.doctor import examine

    return _json(list(examine()))


def _parts_of(config: Config) -> list[Part]:
    return [
        ("configuration.yaml", lambda: render(_without_options(config))),
        ("models.json", lambda: _models(config)),
        ("status.json", lambda: _status(config)),
        ("metrics.txt", lambda: _metrics(config)),
    ]


def _models(config: Config) -> str:
    from starling import model_list

    return _json(model_list.rows(config))


def _status(config: Config) -> str:
    from starling.cli.status import look

    return _json(look(config))


def _metrics(config: Config) -> str:
    from pipeline.observe.exposition import prepare

    return prepare(config, shows_tenants=False)().decode()


def _logs(log_bytes: int) -> Iterator[Part]:
    folder = paths.logs_dir()
    for path in sorted(folder.glob("*.log")) + sorted(paths.agent_logs_dir().glob("*.log")):
        yield f"logs/{path.relative_to(folder)}", partial(_tail, path, log_bytes)


def _tail(path: Path, nbytes: int) -> str:
    """Whole lines from the end of the file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - nbytes))
        if size > nbytes:
            file.readline()
        text = file.read().decode("utf-8", "replace")
    # Not `splitlines`: a text in a line may have other line ends, such as U+2028.
    return "\n".join(_without_output(line) if _PLUGIN in line else line for line in text.split("\n"))


# ------------------------------------------------------------------ plugins


def _without_output(line: str) -> str:
    """A line about a plugin without what it has printed, which may be a prompt."""
    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
    except DECODE_ERRORS:
        return f"[a line of {len(line.rstrip())} characters that is no JSON]"
    if isinstance(text := found.get("text"), str):
        found["text"] = f"[{len(text)} characters]"
    return json.dumps(found, ensure_ascii=False)


def _without_options(config: Config) -> Config:
    """The configuration without the texts of plugins' options."""
    plugins = tuple(msgspec.structs.replace(one, options=_masked(one.options)) for one in config.plugins)
    return msgspec.structs.replace(config, plugins=plugins)


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _masked(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_masked(one) for one in value]
    return MASK if isinstance(value, str) else value


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


# ------------------------------------------------------------------ secrets


def _redaction(config: Config | None, texts: Mapping[str, str]) -> Redaction:
    secrets = [value for name, value in os.environ.items() if any(word in name.upper() for word in _SECRET_VARIABLES)]
    names = [(str(paths.home()), "STARLING_HOME"), (str(Path.home()), "~"), (socket.gethostname(), "HOST")]
    try:
        names.append((getpass.getuser(), "USER"))
    except (KeyError, OSError):  # a user without a name, in a container
        pass
    tenants = {name for text in texts.values() for name in _TENANT.findall(text)}  # also of keys that are gone
    if config is not None:
        secrets += [key.key for key in config.auth.api_keys]
        secrets += [key.cache_salt for key in config.auth.api_keys]
        secrets += [one for plugin in config.plugins for one in _texts(plugin.options) if len(one) >= _LEAST_OPTION]
        tenants |= {key.tenant for key in config.auth.api_keys} | set(config.scheduler.tenant_weights)
        with suppress(ConfigError, PermissionError):
            tenants |= {key.tenant for key in key_file.read_keys(paths.state_dir(config))}
        with suppress(ConfigError):
            secrets.append(token.load(paths.fleet_token(config)))
    names += [(tenant, f"TENANT-{number}") for number, tenant in enumerate(sorted(tenants - _OF_ALL), 1)]
    return Redaction(secrets, [(name, mark) for name, mark in names if name not in ("/", "/root", "root", "localhost")])
