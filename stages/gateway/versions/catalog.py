"""Which version of a model a request goes to, and how versions come and go. The record's one writer.

    begin    a version is to be loaded beside whatever serves: loading
    switch   it has answered its self-test: serving; the one that served until now: retiring
    retire   the model is to go: retiring, and nothing serves it
    drop     gone from the record: it could not be loaded, or nobody is on it any more

A request belongs to the version that serves when it is admitted, and ends on it.  Every change is in the
record before anybody acts on it, so that whoever takes over (another gateway, any stage) finds it half done
and not half forgotten.  Pure but for the function that places the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ModelNotFound, ResourceError
from pipeline.models.versions import MAX_OUTCOMES, ModelVersion, Op, Outcome, VersionTable
from pipeline.protocol.messages import Described


class Instances:
    """`place(version_table)` writes the record and may raise `OSError`: then nothing has changed."""

    def __init__(self, config: Config, version_table: VersionTable, place: Callable[[VersionTable], None]) -> None:
        self.config = config
        self.version_table = version_table
        self._place = place

    # ---------------------------------------------------------------- who is there

    @property
    def all(self) -> tuple[ModelVersion, ...]:
        return self.version_table.versions

    @property
    def names(self) -> list[str]:
        """Models that are served or being loaded."""
        return self.version_table.names

    def get(self, instance_id: str) -> ModelVersion | None:
        return self.version_table.find(instance_id)

    def serving(self, name: str) -> ModelVersion | None:
        return self.version_table.serving(name)

    def versions(self, name: str) -> list[ModelVersion]:
        """All of a model: the one that serves first."""
        mine = [one for one in self.all if one.name == name]
        return sorted(mine, key=lambda one: one.state != "serving")

    def loading(self, name: str = "") -> list[ModelVersion]:
        return [one for one in self.all if one.state == "loading" and name in ("", one.name)]

    def retiring(self, name: str = "") -> list[ModelVersion]:
        return [one for one in self.all if one.state == "retiring" and name in ("", one.name)]

    def is_leaving(self, name: str) -> bool:
        """It is being unloaded: versions are there, and none that serves or will."""
        versions = self.versions(name)
        return bool(versions) and all(one.state == "retiring" for one in versions)

    def settings(self, name: str) -> ModelConfig:
        """What a new version of it is loaded with: as it runs, else as it is configured. Raises `ModelNotFound`."""
        known = self.serving(name)
        settings = known.settings if known is not None else self.config.model(name) if name else None
        if settings is None:
            raise ModelNotFound(f"there is no model {name!r} in the configuration: give its file too", "target")
        return settings

    def home_of(
        self, name: str, instance_id: str, digest: str, described: Mapping[str, Described]
    ) -> ModelVersion | None:
        """The version on which an answer that was begun on `instance_id` comes out the same.

        Its own one, or another of the same file.  None: there is none, or it is not known yet.
        """
        own = [one for one in self.versions(name) if one.id == instance_id]
        for one in own + self.versions(name):
            known = described.get(one.id)
            if one.state != "loading" and known is not None and known.digest == digest:
                return one
        return None

    def is_undecided(self, name: str, described: Mapping[str, Described]) -> bool:
        """A version of it that takes requests, or did, is not known well enough to tell."""
        return any(one.state != "loading" and one.id not in described for one in self.versions(name))

    # ---------------------------------------------------------------- how they come and go

    def begin(self, settings: ModelConfig, change: str, op: Op, until: float) -> ModelVersion:
        serial = self.version_table.serial + 1
        new = ModelVersion(
            name=settings.name,
            serial=serial,
            settings=settings,
            state="loading",
            change=change,
            op=op,
            until=until,
        )
        self._put((*self.all, new), serial=serial)
        return new

    def pin(self, instance_id: str, digest: str) -> None:
        """From now on it is that file, whatever its path holds."""
        self._edit(instance_id, digest=digest)

    def switch(self, instance_id: str) -> ModelVersion | None:
        """It serves from now on; returns the one that did until now."""
        new = self._known(instance_id)
        old = self.serving(new.name)
        others = [one for one in self.all if one.id != new.id]
        # In the place of the old one: the first model is what a request gets that names none.
        at = others.index(old) if old is not None else len(others)
        if old is not None:
            others[at] = msgspec.structs.replace(old, state="retiring", until=0.0, change="")
        others.insert(at, msgspec.structs.replace(new, state="serving", until=0.0, change=""))
        previous = old.id if old is not None else ""
        self._put(tuple(others), Outcome(new.change, new.op, new.name, new.id, new.digest, previous))
        return old

    def retire(self, instance_id: str, change: str, until: float) -> None:
        """Its model goes: what is still in flight at `until` (s since 1970) is ended."""
        self._edit(instance_id, state="retiring", change=change, op="unload", until=until)

    def drop(self, instance_id: str, outcome: Outcome | None = None) -> None:
        self._put(tuple(one for one in self.all if one.id != instance_id), outcome)

    def outcome(self, change: str) -> Outcome | None:
        return next((one for one in self.version_table.outcomes if one.change == change), None)

    # ---------------------------------------------------------------- pieces

    def _known(self, instance_id: str) -> ModelVersion:
        found = self.get(instance_id)
        if found is None:
            raise KeyError(instance_id)
        return found

    def _edit(self, instance_id: str, **fields: object) -> None:
        new = msgspec.structs.replace(self._known(instance_id), **fields)
        self._put(tuple(new if one.id == instance_id else one for one in self.all))

    def _put(self, instances: tuple[ModelVersion, ...], outcome: Outcome | None = None, serial: int = 0) -> None:
        outcomes = self.version_table.outcomes + ((outcome,) if outcome is not None else ())
        fresh = msgspec.structs.replace(
            self.version_table,
            versions=instances,
            outcomes=outcomes[-MAX_OUTCOMES:],
            serial=serial or self.version_table.serial,
        )
        try:
            self._place(fresh)
        except OSError as error:
            raise ResourceError(
                f"the record of loaded models cannot be written: {error.strerror}; free space in server.run_dir",
                param="server.run_dir",
            ) from None
        self.version_table = fresh
