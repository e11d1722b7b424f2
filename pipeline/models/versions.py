"""Which versions of which models there are: the record that the gateway writes and every stage follows.

    RUN_DIR/versions.json          the record, placed by rename; absent: the models as they are configured
    RUN_DIR/worker-SLUG.failed   why an instance's worker group could not begin

An *instance* is one loaded version of a model, with arenas, a worker group and a life of its own.  Its
`id` (`NAME`, later `NAME@1`, ...) is what the stages call it among themselves and is never used twice;
its `name` is what requests ask for.  As configured, a model has one instance, its id the name itself.

    loading -> serving -> retiring -> (gone from the record)
       `----------------------------->  it could not begin

The record is of the running server: it outlives every process of it, and an orderly end removes it with the
sockets (leftovers.py), so that a fresh start serves what is configured.  It also counts for nothing when
the configured models are others than when it was written.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import StarlingError
from pipeline.models import store

log = logging.getLogger("starling.version_table")

RECORD = "versions.json"
MAX_OUTCOMES = 32  # of past changes

State = Literal["loading", "serving", "retiring"]
Op = Literal["load", "reload", "unload"]


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One loaded version of a model."""

    name: str
    serial: int  # 0: as configured; grows
    settings: ModelConfig  # `settings.name` is `name`
    digest: str = ""  # SHA-256 of the GGUF file, hex; "" until it is known: then the path decides
    state: State = "serving"
    change: str = ""  # id of the change that it comes or goes with
    op: Op = "load"  # of that change
    until: float = 0.0  # s since 1970: loading is given up, what is still in flight is ended; 0: never

    @property
    def id(self) -> str:
        return f"{self.name}@{self.serial}" if self.serial else self.name

    @property
    def slug(self) -> str:
        """The id as a file name."""
        return self.id.replace("/", "--")

    @property
    def model(self) -> ModelConfig:
        """Its settings under its own id, as stages know it; the digest, once known, is its `sha256`."""
        return msgspec.structs.replace(self.settings, name=self.id, sha256=self.digest or self.settings.sha256)

    @property
    def stage(self) -> str:
        """Name of its worker's process: of its lock, its status record, in `starling status`."""
        return f"worker-{self.slug}"


class Outcome(msgspec.Struct, frozen=True):
    """How a change ended. `code` is "" when it was done."""

    change: str
    op: Op
    name: str
    instance: str = ""  # id of the one that came or went
    digest: str = ""
    previous: str = ""  # id of the one that served before
    ended: int = 0  # requests that were not finished in time
    code: str = ""  # as in pipeline/errors.py
    message: str = ""
    param: str = ""


class VersionTable(msgspec.Struct, frozen=True):
    """The record. Of a name at most one instance is serving."""

    configured: str  # digest of the configured models
    serial: int  # the last one given
    versions: tuple[ModelVersion, ...]
    outcomes: tuple[Outcome, ...] = ()  # oldest first

    def find(self, instance_id: str) -> ModelVersion | None:
        return next((one for one in self.versions if one.id == instance_id), None)

    def serving(self, name: str) -> ModelVersion | None:
        return next((one for one in self.versions if one.name == name and one.state == "serving"), None)

    @property
    def names(self) -> list[str]:
        """What requests may ask for: names with an instance that serves or loads, in their order."""
        return list(dict.fromkeys(one.name for one in self.versions if one.state != "retiring"))


def initial(config: Config) -> VersionTable:
    """The models as they are configured."""
    instances = tuple(ModelVersion(name=model.name, serial=0, settings=model) for model in config.models)
    return VersionTable(_identity(config), 0, instances)


def _identity(config: Config) -> str:
    return hashlib.sha256(msgspec.json.encode(config.models)).hexdigest()[:32]


def read(config: Config) -> VersionTable:
    """What there is now; as configured where nothing is recorded. Raises `OSError` when it cannot be read."""
    try:
        return _decode(config, record_path(config).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return initial(config)


def _decode(config: Config, raw: bytes) -> VersionTable:
    try:
        version_table = msgspec.json.decode(raw, type=VersionTable)
    except msgspec.DecodeError as error:  # of another version of this program: a rename leaves no half
        log.warning("the record of loaded models is not understood and not used", extra={"error": str(error)})
        return initial(config)
    return version_table if version_table.configured == _identity(config) else initial(config)


def write(config: Config, version_table: VersionTable) -> None:
    """Place the record. Only the gateway does. Raises `OSError`: then the old one stands."""
    path = record_path(config)
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(msgspec.json.encode(version_table))
    os.replace(new, path)


def record_path(config: Config) -> Path:
    return paths.run_dir(config) / RECORD


class VersionFollower:
    """Reads the record again when it has been replaced; cheap enough for every tick."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path = record_path(config)
        self._seen = self._stamp()
        self._has_complained = False
        self.table = read(config)

    def poll(self) -> bool:
        """True when `version_table` is another one than before."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        try:
            found = read(self._config)
        except OSError as error:
            # Not the one that is configured: versions that serve would be dropped.
            if not self._has_complained:
                log.error(
                    "the record of loaded models cannot be read, and what is known holds",
                    extra={"path": str(self._path), "error": str(error)},
                )
            self._has_complained = True
            return False
        self._has_complained = False
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


def find_index(instance: ModelVersion, models_dir: Path) -> Path | None:
    """Its `.idx`, if it has been made; by its digest when that is known, whatever its path holds by now."""
    if not instance.digest:
        return store.find_index(instance.model, models_dir)
    index = models_dir / f"{instance.digest}.idx"
    return index if index.is_file() else None


# ------------------------------------------------------------------ failures


class Failure(NamedTuple):
    """Why a worker group could not begin; as `StarlingError`."""

    code: str
    message: str
    param: str = ""


def failure_path(run_dir: Path, stage: str) -> Path:
    """`stage`: `ModelVersion.stage`."""
    return run_dir / f"{stage}.failed"


def note_failure(run_dir: Path, stage: str, error: StarlingError) -> None:
    """Never raises: who waits for it has a deadline too."""
    path = failure_path(run_dir, stage)
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_bytes(msgspec.json.encode(Failure(error.code, error.message, error.param)))
        os.replace(new, path)
    except OSError as problem:
        log.error("a failure cannot be noted", extra={"error": str(problem)})


def read_failure(run_dir: Path, stage: str) -> Failure | None:
    try:
        return msgspec.json.decode(failure_path(run_dir, stage).read_bytes(), type=Failure)
    except (OSError, msgspec.DecodeError):
        return None
