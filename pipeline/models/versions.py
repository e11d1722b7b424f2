"""Model versions: the table that the gateway writes and every other stage follows.

    RUN_DIR/versions.json        the table, replaced atomically; absent: the models as configured
    RUN_DIR/versions.bell        its times are set after each change of the table, to wake the stages that watch it
    RUN_DIR/worker-SLUG.failed   why the worker group of a version could not start
    RUN_DIR/worker-SLUG.start    a request to start that group now, for the worker pool

The second worker group of a version, if it has several (worker_groups.py), is SLUG~1, and so on.

A *version* is one loaded state of a model, with arenas and a worker group of its own.  Its `id` (`NAME`, later
`NAME@1`, ...) identifies it between stages and is never reused; its `name` is what requests ask for.  As configured,
a model has one version, whose id is the name itself.

    loading -> serving -> retiring -> (removed from the table)
       `----------------------------->  it could not start

The table belongs to the running server: it outlives every one of its processes, and an orderly stop removes it
with the sockets (pipeline/supervise/cleanup.py), so that a fresh start serves what is configured.  Models without
`preload` enter it when they are loaded.  A table that was written for other configured models is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import StarlingError
from pipeline.files import replace_file
from pipeline.models import store
from shm.decoding import DECODE_ERRORS

log = logging.getLogger("starling.versions")

TABLE_FILE = "versions.json"
BELL_FILE = "versions.bell"
MAX_OUTCOMES = 32  # results of past changes that the table keeps

State = Literal["loading", "serving", "retiring"]
Op = Literal["load", "reload", "unload", "demand"]  # "demand": a load that requests wait for


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One loaded version of a model."""

    name: str
    serial: int  # 0: as configured; grows
    settings: ModelConfig  # `settings.name` is `name`
    digest: str = ""  # SHA-256 of the GGUF file, hex; "" until it is known: then the path decides
    state: State = "serving"
    change: str = ""  # id of the change that loads or removes this version
    op: Op = "load"  # kind of that change
    adapters: tuple[tuple[str, str], ...] = ()  # name and digest of each adapter, once known: then the path is not read
    until: float = 0.0  # deadline, s since 1970, of loading or of requests in flight; 0: none
    group: int = 0  # which of its worker groups a process belongs to; always 0 in the table

    @property
    def takes_requests(self) -> bool:
        """Whether requests may belong to it. One that an operator loads must pass a self-test before that."""
        return self.state != "loading" or self.op == "demand"

    @property
    def id(self) -> str:
        """`NAME`, or `NAME@SERIAL`."""
        return f"{self.name}@{self.serial}" if self.serial else self.name

    @property
    def slug(self) -> str:
        """The id as a file name."""
        return self.id.replace("/", "--")

    @property
    def model(self) -> ModelConfig:
        """Its settings under its own id, as stages use them; the digest, once known, is its `sha256`."""
        return msgspec.structs.replace(self.settings, name=self.id, sha256=self.digest or self.settings.sha256)

    @property
    def stage(self) -> str:
        """Stage name of its worker: in its lock, its status record and `starling status`."""
        return f"worker-{self.group_slug}"

    @property
    def group_slug(self) -> str:
        """The slug of one of its worker groups. No model's name has a tilde."""
        return f"{self.slug}~{self.group}" if self.group else self.slug

    @property
    def group_id(self) -> str:
        """How a command line names one of its worker groups; the id for the first one."""
        return f"{self.id}~{self.group}" if self.group else self.id

    def of_group(self, number: int) -> ModelVersion:
        """The version as a process of that worker group has it."""
        return msgspec.structs.replace(self, group=number)


class Outcome(msgspec.Struct, frozen=True):
    """Result of a change. `code` is "" when it succeeded."""

    change: str
    op: Op
    name: str
    version: str = ""  # id of the version that was loaded or removed
    digest: str = ""
    previous: str = ""  # id of the version that served before
    ended: int = 0  # requests that did not finish in time
    code: str = ""  # as in pipeline/errors.py
    message: str = ""
    param: str = ""


class VersionTable(msgspec.Struct, frozen=True):
    """All loaded versions. At most one version of a name is serving."""

    configured: str  # digest of the configured models
    serial: int  # the last serial that was assigned
    versions: tuple[ModelVersion, ...]
    outcomes: tuple[Outcome, ...] = ()  # oldest first
    withheld: tuple[str, ...] = ()  # models that an operator has unloaded: no request loads them

    def find(self, version_id: str) -> ModelVersion | None:
        """The version of that id."""
        return next((one for one in self.versions if one.id == version_id), None)

    def find_group(self, group_id: str) -> ModelVersion | None:
        """The version of a worker group, by `ModelVersion.group_id`."""
        name, _, number = group_id.partition("~")
        found = self.find(name)
        if found is None or not (number.isdecimal() or name == group_id):
            return None
        return found.of_group(int(number or 0))

    def serving(self, name: str) -> ModelVersion | None:
        """The serving version of a model."""
        return next((one for one in self.versions if one.name == name and one.state == "serving"), None)

    @property
    def names(self) -> list[str]:
        """Names that requests may ask for: models with a serving or loading version, in table order."""
        return list(dict.fromkeys(one.name for one in self.versions if one.state != "retiring"))


# ------------------------------------------------------------------ the file


def initial(config: Config) -> VersionTable:
    """The table of the models as configured: those that are loaded at the start."""
    found = tuple(ModelVersion(name=one.name, serial=0, settings=one) for one in config.preloaded)
    return VersionTable(_identity(config), 0, found)


def _identity(config: Config) -> str:
    return hashlib.sha256(msgspec.json.encode(config.models)).hexdigest()[:32]


def read(config: Config) -> VersionTable:
    """The current table; `initial` when there is no file. Raises `OSError` when it cannot be read."""
    try:
        return _decode(config, table_path(config).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return initial(config)


def _decode(config: Config, raw: bytes) -> VersionTable:
    try:
        table = msgspec.json.decode(raw, type=VersionTable)
    except DECODE_ERRORS as error:  # written by another release: atomic replacement leaves no partial file
        log.warning("table of model versions does not decode, using the configuration", extra={"error": str(error)})
        return initial(config)
    return table if table.configured == _identity(config) else initial(config)


def write(config: Config, table: VersionTable) -> None:
    """Replace the table, and wake the stages that watch `bell_path`. Only the gateway does this.

    Raises `OSError`; the old table then stays.
    """
    replace_file(table_path(config), msgspec.json.encode(table), of_run=True)
    with contextlib.suppress(OSError):  # no stage watches it, or one looks at the table at its next frame
        os.utime(bell_path(config))


def table_path(config: Config) -> Path:
    """Where the table is."""
    return paths.run_dir(config) / TABLE_FILE


def bell_path(config: Config) -> Path:
    """A file whose times are set after each change of the table: a watch of it sees no other file of its directory."""
    return paths.run_dir(config) / BELL_FILE


class VersionFollower:
    """Reads the table again when its file has been replaced; a `poll` costs one `stat`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path = table_path(config)
        self._seen = self._stamp()
        self._has_logged = False
        self.table = read(config)

    def poll(self) -> bool:
        """Whether `table` has changed. A table that cannot be read leaves it as it is."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        try:
            found = read(self._config)
        except OSError as error:
            # Falling back to the configured models would drop versions that serve requests.
            if not self._has_logged:
                facts = {"path": str(self._path), "error": str(error)}
                log.error("table of model versions cannot be read, keeping the last one", extra=facts)
            self._has_logged = True
            return False
        self._has_logged = False
        self._seen = stamp
        before, self.table = self.table, found
        return before != self.table

    def _stamp(self) -> tuple[int, int, int]:
        try:
            info = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return info.st_ino, info.st_mtime_ns, info.st_size


# ------------------------------------------------------------------ checkpoints


def find_index(version: ModelVersion, models_dir: Path) -> Path | None:
    """Path of the version's `.idx` file, if it exists. A known digest decides, whatever the model's path now holds."""
    if not version.digest:
        return store.find_index(version.model, models_dir)
    index = models_dir / f"{version.digest}.idx"
    return index if index.is_file() else None


# ------------------------------------------------------------------ failures


class Failure(NamedTuple):
    """Why a worker group could not start; the fields of a `StarlingError`."""

    code: str
    message: str
    param: str = ""


def failure_path(run_dir: Path, stage: str) -> Path:
    """`stage`: `ModelVersion.stage`."""
    return run_dir / f"{stage}.failed"


def write_failure(run_dir: Path, stage: str, error: StarlingError) -> None:
    """Record the failure for the gateway. Never raises: the gateway's deadline covers a missing record."""
    try:
        replace_file(failure_path(run_dir, stage), msgspec.json.encode(Failure(error.code, error.message, error.param)))
    except OSError as problem:
        log.error("failure of a worker group cannot be recorded", extra={"error": str(problem)})


def request_start(run_dir: Path, stage: str) -> None:
    """Ask the worker pool to start a group that has given up at once. Raises `OSError`."""
    replace_file(start_request_path(run_dir, stage), b"")


def take_start_request(run_dir: Path, stage: str) -> bool:
    """Whether there was a request, which is removed."""
    try:
        start_request_path(run_dir, stage).unlink()
    except OSError:
        return False
    return True


def start_request_path(run_dir: Path, stage: str) -> Path:
    """`stage`: `ModelVersion.stage`."""
    return run_dir / f"{stage}.start"


def read_failure(run_dir: Path, stage: str) -> Failure | None:
    """The recorded failure, if there is one."""
    try:
        return msgspec.json.decode(failure_path(run_dir, stage).read_bytes(), type=Failure)
    except (OSError, *DECODE_ERRORS):
        return None
