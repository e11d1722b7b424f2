"""The key file: API keys that `starling keys` makes, as digests, which a running server follows.

    STATE_DIR/keys.json    0600, {"version", "digest", "keys"}; replaced atomically, and written under keys.lock

Once the file exists the server requires a key, also if the file has none or is damaged: only its absence at the start
leaves a server without configured keys open.  `digest` is a SHA-256 over the keys, so that a changed byte is damage and
never another permission.  After damage the keys that were read last stay valid until the process ends; a process that
has read none refuses all keys of the file.

A key that `starling keys rotate` has replaced stays valid until `previous_until`, by the steady clock of the process
that checks it (steady_clock.py): a system clock that is set back makes no key valid again.  One that was seen expired
is forgotten, and its digest leaves the file with the next edit.

A key has 256 random bits, so its plain SHA-256 cannot be inverted by guessing.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from pipeline.errors import ConfigError
from pipeline.faults import points
from pipeline.files import make_directory, replace_file
from pipeline.runtime.steady_clock import clock_path, read_ns
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.keys")

FILE_NAME = "keys.json"
LOCK_NAME = "keys.lock"
MAX_KEYS = 1000  # a record has at most about 600 bytes
MAX_BYTES = 1 << 20  # of the file
PREFIX = "sk-"  # what secret scanners and people recognise as a key

Scope = Literal["models", "admin", "metrics"]
SCOPES: tuple[Scope, ...] = ("models", "admin", "metrics")

Limit = Annotated[int, Meta(ge=0, le=1_000_000_000_000)] | None  # None: as configured for all tenants; 0: no limit
_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}\\Z")]
_DigestOrNone = Annotated[str, Meta(pattern="^([0-9a-f]{64})?\\Z")]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@-]{1,64}\Z")]
_Time = Annotated[float, Meta(ge=0, le=1e12)]


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one key. Each one that is given replaces its tenant's limit and counts this key's requests alone."""

    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    max_concurrent: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None  # requests in flight
    requests_per_day: Limit = None  # a day begins at 00:00 UTC
    tokens_per_day: Limit = None
    requests_total: Limit = None
    tokens_total: Limit = None

    def given(self) -> dict[str, int]:
        """The limits that are given, by name."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class StoredKey(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One key. Names are unique."""

    name: _Name
    id: Annotated[str, Meta(pattern="^[0-9a-f]{16}\\Z")]  # drawn; never used again, so that no usage is inherited
    tenant: _Name
    sha256: _Digest  # of the key
    created: _Time  # s since 1970
    scopes: tuple[Scope, ...] = ("models",)
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    limits: KeyLimits = KeyLimits()
    rotated: _Time = 0.0  # s since 1970; 0.0: never
    previous: _DigestOrNone = ""  # of the key before the rotation, which is valid until `previous_until`
    previous_until: _Time = 0.0

    def is_previous_valid(self, now: float) -> bool:
        """Whether the key before the rotation is still valid."""
        return bool(self.previous) and now < self.previous_until


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    digest: str
    keys: Annotated[list[StoredKey], Meta(max_length=MAX_KEYS)]


class _Signature(NamedTuple):
    """Changes with each replacement of the file."""

    inode: int
    size: int
    modified: int
    changed: int


def key_path(state_dir: Path) -> Path:
    """The key file of a server."""
    return state_dir / FILE_NAME


def digest_of(key: str) -> str:
    """What is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def generate() -> str:
    """A new key."""
    import secrets  # of `starling keys` alone, and every process of a server imports this module

    return PREFIX + secrets.token_urlsafe(32)


# ------------------------------------------------------------------ reading


class Look(NamedTuple):
    """What one look at the file has found."""

    seen: _Signature | None  # None: the file could not be examined
    keys: list[StoredKey] | None = None  # None: as before
    problem: str = ""  # why the file as it is cannot be used
    is_absent: bool = False


class KeyFile:
    """The keys as a running process follows them: one `stat` for each `look`, and a read after each change.

    `look` may be called in another thread; everything else belongs to one.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock`: s since 1970; a steady one where keys are checked. Reads the file."""
        self.path = path
        self.exists = False  # now, or since this process started
        self.problem = ""  # why the file as it is cannot be used; "": it can be
        self.keys: dict[str, StoredKey] = {}  # by id
        self.errors = 0  # changes of the file that could not be used
        self._clock = clock
        self._by_digest: dict[str, StoredKey] = {}
        self._expired: set[str] = set()  # digests of replaced keys in the file
        self._seen: _Signature | None = None
        self._points = points.DiskPoints("keys")
        self.refresh()

    def refresh(self) -> None:
        """Read the file if it has changed. Never raises."""
        self.take(self.look())

    def look(self) -> Look:
        """Examine the file, and read it if it has changed. Changes nothing, and never raises."""
        try:
            self._points.open.hit()
            seen = _signature(os.stat(self.path))
        except FileNotFoundError:
            return Look(None, is_absent=True)
        except OSError as error:
            return Look(None, problem=error.strerror or str(error))
        if seen == self._seen:
            return Look(seen, problem=self.problem)
        try:
            self._points.read.hit()
            seen, keys = _read(self.path)
        except FileNotFoundError:  # removed since
            return Look(None, is_absent=True)
        except (OSError, ConfigError) as error:
            reason = error.message if isinstance(error, ConfigError) else f"{self.path}: {error.strerror or error}"
            return Look(seen, problem=reason)
        return Look(seen, keys)

    def take(self, look: Look) -> None:
        """Use what a look has found."""
        if look.is_absent:
            if self.exists and not self.problem:
                self._fail(None, "it has been removed")
            return
        self.exists = True
        if look.seen is None:
            if not self.problem:
                self._fail(None, look.problem)
        elif look.problem:
            if look.seen != self._seen:
                self._fail(look.seen, look.problem)
        elif look.keys is not None:
            self._seen, self.problem = look.seen, ""
            self.keys = {key.id: key for key in look.keys}
            self._by_digest = {key.sha256: key for key in look.keys}
            replaced = {key.previous: key for key in look.keys if key.previous}
            self._expired &= set(replaced)
            self._by_digest |= {name: key for name, key in replaced.items() if name not in self._expired}
            log.info("API keys read", extra={"keys": len(look.keys)})

    def find(self, digest: str) -> StoredKey | None:
        """The key with this digest, if it is valid."""
        key = self._by_digest.get(digest)
        if key is not None and key.sha256 != digest and not key.is_previous_valid(self._clock()):
            del self._by_digest[digest]
            self._expired.add(digest)
            return None
        return key

    def _fail(self, seen: _Signature | None, reason: str) -> None:
        self._seen, self.problem = seen, reason
        self.errors += 1
        facts = {"path": str(self.path), "reason": reason, "keys_read_before": len(self.keys)}
        log.error("the key file cannot be used; keys that were read before stay valid, others fail", extra=facts)


def _signature(info: os.stat_result) -> _Signature:
    return _Signature(info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _read(path: Path) -> tuple[_Signature, list[StoredKey]]:
    """Raises `FileNotFoundError`, `OSError`, and `ConfigError` if it is damaged or others may write it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        mode = stat.S_IMODE(info.st_mode)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or mode & 0o022:
            raise ConfigError(
                f"{path} has mode {mode:o} and owner {info.st_uid}, expected a file that only user {os.getuid()} can "
                f"write: run `starling keys` as the server's user, and chmod 600 the file if its keys are known to be "
                f"right",
                "server.state_dir",
            )
        raw = file.read(MAX_BYTES + 1)
    return _signature(info), parse(raw, str(path))


def parse(raw: bytes, where: str = FILE_NAME) -> list[StoredKey]:
    """The keys of a file. Raises `ConfigError`."""
    try:
        if len(raw) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        contents = msgspec.json.decode(raw, type=_Contents)
        if contents.digest != contents_digest(contents.keys):
            raise ValueError("its contents do not have its digest")
        for what in ("name", "id", "sha256"):
            values = [getattr(key, what) for key in contents.keys]
            if len(set(values)) < len(values):
                raise ValueError(f"two keys have the same {what}")
    except (*DECODE_ERRORS, ValueError) as error:
        raise ConfigError(
            f"{where} is damaged: {error}; put back a copy, or remove it and make the keys again with `starling keys "
            f"add`",
            "server.state_dir",
        ) from None
    return contents.keys


def contents_digest(keys: list[StoredKey]) -> str:
    """The digest that a file with these keys has."""
    return hashlib.sha256(msgspec.json.encode(keys)).hexdigest()


# ------------------------------------------------------------------ writing


def time_of(state_dir: Path) -> float:
    """The time by which servers of this home check keys, s since 1970: of several clocks the one that is behind."""
    clocks = [clock_path(state_dir, "gateway"), *state_dir.glob("clock/orchestrator-*.json")]
    return min(map(read_ns, clocks)) / 1e9


def read_keys(state_dir: Path) -> list[StoredKey]:
    """The keys in the file; none if there is no file. Raises `ConfigError`."""
    path = key_path(state_dir)
    try:
        return _read(path)[1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "server.state_dir") from None


@contextmanager
def edited(state_dir: Path, now: float | None = None) -> Iterator[list[StoredKey]]:
    """The list of keys, to be changed in place; it is written at the end. One process at a time edits it.

    It has no digests of keys that were replaced and have expired. `now`: s since 1970; None: `time_of`.
    Raises `ConfigError` if the file is damaged or cannot be written; then nothing has changed.
    """
    path = key_path(state_dir)
    try:
        make_directory(state_dir)
        fd = os.open(state_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{state_dir}: {error.strerror}; server.state_dir moves it", "server.state_dir") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        now = time_of(state_dir) if now is None else now
        keys = [
            key if key.is_previous_valid(now) else msgspec.structs.replace(key, previous="")
            for key in read_keys(state_dir)
        ]
        yield keys
        raw = msgspec.json.format(msgspec.json.encode(_Contents(1, contents_digest(keys), keys)), indent=1) + b"\n"
        parse(raw, str(path))  # what cannot be read is not written
        try:
            points.DiskPoints("keys").write.hit()
            replace_file(path, raw, durable=True, mode=0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", "server.state_dir") from None
    finally:
        os.close(fd)
