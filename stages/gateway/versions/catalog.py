"""The version catalog: which version of a model requests go to, and the life cycle of versions.

It is the only writer of the version table.

    begin    loading   the version is loaded beside the serving one
    switch   serving   it has passed its self-test; the previous version retires
    retire   retiring  the model is being unloaded, and no version serves; so does retire_idle
    drop               removed from the table: it could not be loaded, or its last request has ended

A request belongs to the version that serves when it is admitted, and ends on it.  Each change is written to the table
before it takes effect, so that another process (the next gateway, any stage) can continue from every state.  Pure,
except for the injected function that writes the table.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ModelNotFound, ResourceError
from pipeline.models.versions import MAX_OUTCOMES, ModelVersion, Op, Outcome, VersionTable
from pipeline.protocol.messages import Described
from stages.gateway.versions.loadable import LoadableModels


class VersionCatalog:
    """One per gateway. `write(version_table)` stores the table; if it raises `OSError`, nothing has changed."""

    def __init__(self, config: Config, version_table: VersionTable, write: Callable[[VersionTable], None]) -> None:
        self.config = config
        self.version_table = version_table
        self.loadable = LoadableModels(config, paths.models_dir())
        self._write = write

    # ---------------------------------------------------------------- queries

    @property
    def all(self) -> tuple[ModelVersion, ...]:
        """All versions, in the order of the table."""
        return self.version_table.versions

    @property
    def names(self) -> list[str]:
        """The models that are serving or loading."""
        return self.version_table.names

    def get(self, version_id: str) -> ModelVersion | None:
        """Return a version by its id."""
        return self.version_table.find(version_id)

    def serving(self, name: str) -> ModelVersion | None:
        """Return the version of a model that new requests go to."""
        return self.version_table.serving(name)

    def may_load(self, name: str) -> bool:
        """Whether a request for the model may load it."""
        is_allowed = self.config.on_demand.enabled and name not in self.version_table.withheld
        return is_allowed and self.loadable.settings(name) is not None

    def served_names(self) -> list[str]:
        """These models, and their adapters as NAME:ADAPTER."""
        return [one for name in self.names for one in (name, *(f"{name}:{own}" for own in self.adapters(name)))]

    def known_names(self) -> list[str]:
        """The models that requests may ask for: loaded ones, and those that a request loads."""
        others = self.loadable.names() if self.config.on_demand.enabled else []
        return list(dict.fromkeys((*self.names, *(name for name in others if self.may_load(name)))))

    def resolve(self, name: str) -> str:
        """The name of a model that has a version or may be loaded; "" is the first one. Raises `ModelNotFound`."""
        found = name or self._first()
        if not self.versions(found) and not self.may_load(found):
            names = self.known_names()
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else "served: " + (", ".join(map(repr, names)) or "none")
            raise ModelNotFound(f"there is no model {name!r}; {hint}", "model")
        return found

    def resolve_adapter(self, name: str) -> tuple[str, str]:
        """The model and the adapter that a request asks for; "" without one. Raises `ModelNotFound`.

        A request names NAME:ADAPTER, or the adapter alone, if no model has that name and one loaded model has it.
        """
        base, separator, adapter = name.partition(":")
        if not separator:
            of = [] if self.versions(name) or self.may_load(name) else self.models_with(name)
            if len(of) > 1:
                listed = " and ".join(f"{model}:{name}" for model in of)
                raise ModelNotFound(f"adapter {name!r} belongs to several models; ask for one of {listed}", "model")
            return (of[0], name) if of else (self.resolve(name), "")
        model = self.resolve(base) if base else self.resolve(name)
        known = self.adapters(model)
        if adapter not in known:
            listed = ", ".join(f"{model}:{one}" for one in known) or "none"
            raise ModelNotFound(f"model {model!r} has no adapter {adapter[:100]!r}; it has: {listed}", "model")
        return model, adapter

    def resolve_owner(self, name: str) -> str:
        """The model whose sessions a request names, also one that no request may load. Raises `ModelNotFound`."""
        try:
            return self.resolve_adapter(name)[0]
        except ModelNotFound:
            base = name.partition(":")[0]
            if self.loadable.settings(base) is None:
                raise
            return base

    def adapters(self, name: str) -> list[str]:
        """Names of the adapters of the version of a model that new requests go to, or will."""
        mine = self.versions(name)
        settings = mine[0].settings if mine else self.loadable.settings(name)
        return [adapter.name for adapter in settings.adapters] if settings is not None else []

    def models_with(self, adapter: str) -> list[str]:
        """The loaded models that have an adapter of that name."""
        return [name for name in self.names if adapter in self.adapters(name)]

    def _first(self) -> str:
        """The model of requests that name none: the first configured one that can be used, or else the first loaded."""
        loaded = self.names
        configured = [one.name for one in self.config.models if one.name in loaded or self.may_load(one.name)]
        return (*configured, *loaded, *(one.name for one in self.all), "")[0]

    def versions(self, name: str) -> list[ModelVersion]:
        """Return all versions of a model, the serving one first."""
        mine = [version for version in self.all if version.name == name]
        return sorted(mine, key=lambda version: version.state != "serving")

    def loading(self, name: str = "") -> list[ModelVersion]:
        """Return the loading versions, of all models or of one."""
        return [version for version in self.all if version.state == "loading" and name in ("", version.name)]

    def retiring(self, name: str = "") -> list[ModelVersion]:
        """Return the retiring versions, of all models or of one."""
        return [version for version in self.all if version.state == "retiring" and name in ("", version.name)]

    def is_retiring(self, name: str) -> bool:
        """True if the model has versions and all of them are retiring."""
        versions = self.versions(name)
        return bool(versions) and all(version.state == "retiring" for version in versions)

    def is_unloading(self, name: str) -> bool:
        """True if all versions of the model are retiring, and no request may load it again."""
        return self.is_retiring(name) and not self.may_load(name)

    def settings(self, name: str) -> ModelConfig:
        """Return the settings of the serving version, or of the configured or pulled model. Raises `ModelNotFound`."""
        known = self.serving(name)
        settings = known.settings if known is not None else self.loadable.settings(name)
        if settings is None:
            raise ModelNotFound(f"there is no model {name!r} in the configuration; give its file as well", "target")
        return settings

    def equivalent(
        self, name: str, version_id: str, digest: str, kv_revision: int, described: Mapping[str, Described]
    ) -> ModelVersion | None:
        """Return a version that generates the same output as `version_id`: itself, or another of the same file.

        digest, kv_revision: of the version when it admitted the request. A newer release may compute other tokens from
        the same file, then with another revision, also in a version of that id.
        None: there is no such version, or it is not described yet.
        """
        own = [version for version in self.versions(name) if version.id == version_id]
        for version in own + self.versions(name):
            known = described.get(version.id)
            is_same = known is not None and (known.digest, known.kv_revision) == (digest, kv_revision)
            if version.takes_requests and is_same:
                return version
        return None

    def has_undescribed(self, name: str, described: Mapping[str, Described]) -> bool:
        """True if a version of the model that takes requests is not described yet."""
        return any(version.takes_requests and version.id not in described for version in self.versions(name))

    # ---------------------------------------------------------------- changes; each may raise `ResourceError`

    def begin(
        self,
        settings: ModelConfig,
        change: str,
        op: Op,
        until: float,
        like: ModelVersion | None = None,
        renewed: str = "",
        digest: str = "",
    ) -> ModelVersion:
        """Add a loading version, which must serve by `until` (s since 1970), and return it.

        like: a version whose file and adapters it has, whatever their paths now hold, except the adapter `renewed`.
        digest: SHA-256 of its file, if it is known and `like` is None.
        """
        serial = self.version_table.serial + 1
        pinned = dict(like.adapters) if like is not None else {}
        new = ModelVersion(
            name=settings.name,
            serial=serial,
            settings=settings,
            state="loading",
            change=change,
            op=op,
            until=until,
            digest=like.digest if like is not None else digest,
            adapters=tuple(
                (one.name, pinned[one.name]) for one in settings.adapters if one.name in pinned and one.name != renewed
            ),
        )
        self._put((*self.all, new), serial=serial)
        return new

    def pin(self, version_id: str, digest: str, adapters: tuple[tuple[str, str], ...] = ()) -> None:
        """Bind a version to the file with that digest, even if its path is overwritten; likewise its adapters."""
        self._edit(version_id, digest=digest, adapters=adapters or self._known(version_id).adapters)

    def switch(self, version_id: str) -> ModelVersion | None:
        """Make a version the serving one; return the one that served before."""
        new = self._known(version_id)
        old = self.serving(new.name)
        others = [version for version in self.all if version.id != new.id]
        # At the position of the old version: requests without a model go to the first one.
        at = others.index(old) if old is not None else len(others)
        if old is not None:
            others[at] = msgspec.structs.replace(old, state="retiring", until=0.0, change="")
        others.insert(at, msgspec.structs.replace(new, state="serving", until=0.0, change=""))
        previous = old.id if old is not None else ""
        outcome = Outcome(new.change, new.op, new.name, new.id, new.digest, previous)
        withheld = tuple(name for name in self.version_table.withheld if name != new.name)
        self._put(tuple(others), outcome if new.op != "demand" else None, withheld=withheld)
        return old

    def retire(self, version_id: str, change: str, until: float) -> None:
        """Start unloading the model for an operator: requests in flight at `until` (s since 1970) are ended.

        No request loads it again.
        """
        name = self._known(version_id).name
        withheld = (name,) if self.loadable.settings(name) is not None else ()
        self._edit(version_id, withheld, state="retiring", change=change, op="unload", until=until)

    def retire_idle(self, version_id: str) -> None:
        """Start unloading a model without requests. The next request loads it again."""
        self._edit(version_id, state="retiring", change="", op="unload", until=0.0)

    def withhold(self, name: str, outcome: Outcome) -> None:
        """Let no request load a model that is not loaded, until an operator loads it."""
        self._put(self.all, outcome, withheld=(*self.version_table.withheld, name))

    def drop(self, version_id: str, outcome: Outcome | None = None) -> None:
        """Remove a version; `outcome` is that of its change."""
        self._put(tuple(version for version in self.all if version.id != version_id), outcome)

    def outcome(self, change: str) -> Outcome | None:
        """Return the outcome of a change that has ended."""
        return next((version for version in self.version_table.outcomes if version.change == change), None)

    # ---------------------------------------------------------------- the table

    def _known(self, version_id: str) -> ModelVersion:
        found = self.get(version_id)
        if found is None:
            raise KeyError(version_id)
        return found

    def _edit(self, version_id: str, withheld: tuple[str, ...] = (), **fields: object) -> None:
        """Change fields of a version. `withheld`: names to add."""
        new = msgspec.structs.replace(self._known(version_id), **fields)
        names = tuple(dict.fromkeys((*self.version_table.withheld, *withheld)))
        self._put(tuple(new if version.id == version_id else version for version in self.all), withheld=names)

    def _put(
        self,
        all_versions: tuple[ModelVersion, ...],
        outcome: Outcome | None = None,
        serial: int = 0,
        withheld: tuple[str, ...] | None = None,
    ) -> None:
        """Write the table with these versions. `withheld`: None: as before."""
        outcomes = self.version_table.outcomes + ((outcome,) if outcome is not None else ())
        fresh = msgspec.structs.replace(
            self.version_table,
            versions=all_versions,
            outcomes=outcomes[-MAX_OUTCOMES:],
            serial=serial or self.version_table.serial,
            withheld=self.version_table.withheld if withheld is None else withheld,
        )
        try:
            self._write(fresh)
        except OSError as error:
            raise ResourceError(
                f"cannot write the version table: {error.strerror}; free space in server.run_dir",
                param="server.run_dir",
            ) from None
        self.version_table = fresh
