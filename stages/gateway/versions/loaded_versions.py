"""What tokenizer and scheduler report of each loaded version, and the vocabularies that text is made from.

A version is described once by the tokenizer, with its vocabulary unless the gateway has it already. The scheduler
reports its state with every heartbeat. Vocabularies outlive their versions: an answer that was written in one may
still be read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import msgspec

from pipeline.config.schema import Config
from pipeline.errors import InternalError, ModelUnavailable, StarlingError
from pipeline.models.arena_sizes import max_positions
from pipeline.models.versions import ModelVersion
from pipeline.protocol import messages as m
from stages.gateway.admission.lengths import Bounds
from stages.gateway.requests.token_bytes import TokenBytes
from stages.gateway.tokenizer_client import TokenizerClient
from stages.gateway.versions.catalog import VersionCatalog

log = logging.getLogger("starling.gateway")

MAX_OLD_VOCABULARIES = 2  # of versions that are no longer loaded; for readers of old answers


class LoadedVersions:
    """One per gateway. All tables are by version id, except `vocabularies`, see `RequestSpec.vocabulary`."""

    def __init__(
        self,
        config: Config,
        catalog: VersionCatalog,
        vocabularies: dict[str, TokenBytes],
        tokenizer: TokenizerClient,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when a version may have become ready or stopped being so."""
        self.described: dict[str, m.Described] = {}  # without the vocabulary's bytes
        self.states: dict[str, m.ModelState] = {}
        self.refused: dict[str, StarlingError] = {}  # the tokenizer's last error for a version that is being loaded
        self.vocabularies = vocabularies
        self._config = config
        self._catalog = catalog
        self._tokenizer = tokenizer
        self._on_change = on_change

    def is_ready(self, version: ModelVersion) -> bool:
        """Can that version take requests?"""
        state = self.states.get(version.id)
        return version.id in self.described and state is not None and state.ready

    def bounds(self, version: ModelVersion) -> Bounds:
        """The bounds on prompt and output lengths. The version must be described."""
        limit = version.settings.max_sequence_length
        described = self.described[version.id]
        context = described.context_length
        scheduler = self._config.scheduler
        context = min(context, limit) if limit else context
        positions = 0
        if described.generates and described.kv_shape[0]:
            shape = (*described.kv_shape, described.kv_windowed)
            positions = max_positions(self._config, version.settings, shape, context)
        return Bounds(context, scheduler.max_prompt_tokens, scheduler.max_output_tokens, positions)

    def adapter_digest(self, version: ModelVersion, adapter: str) -> str:
        """The digest of the adapter that a ready version has in memory under that name; "" for "".

        Raises `ModelUnavailable`.
        """
        state = self.states.get(version.id)
        digest = dict(state.adapters).get(adapter, "") if state is not None else ""
        if adapter and not digest:
            raise ModelUnavailable(f"adapter {version.name}:{adapter} is not loaded yet; try again", retry_after_s=1.0)
        return digest

    # ---------------------------------------------------------------- from the scheduler

    def on_scheduler_state(self, frame: m.SchedulerState) -> None:
        """Store the states of all versions in the catalog."""
        for state in frame.models:
            if self._catalog.get(state.model) is None:
                continue  # it has just been unloaded
            known = self.states.get(state.model)
            self.states[state.model] = state
            if known is None or (known.ready, known.digest) != (state.ready, state.digest):
                self._on_change()

    # ---------------------------------------------------------------- from the tokenizer

    def describe_missing(self) -> None:
        """Ask the tokenizer for every description that is missing."""
        for version in self._catalog.all:
            if version.id not in self.described:
                known = tuple(name for name, vocabulary in self.vocabularies.items() if vocabulary)
                self._tokenizer.describe(version.id, known, partial(self._on_described, version))

    def _on_described(self, version: ModelVersion, done: asyncio.Future[m.Described]) -> None:
        if done.cancelled() or self._catalog.get(version.id) is None:
            return
        error = done.exception()
        if error is None:
            try:
                self.on_description(version.id, done.result())
            except ValueError as reason:
                error = InternalError(f"its vocabulary cannot be used: {reason}")
        if error is None:
            return
        if isinstance(error, StarlingError) and version.state == "loading":
            self.refused[version.id] = error
        else:
            log.warning("a model is not described", extra={"version": version.id, "reason": str(error)})

    def on_description(self, version_id: str, described: m.Described) -> None:
        """Store a description. One without a vocabulary is dropped, and asked for again, if the vocabulary is gone."""
        vocabulary = self.vocabularies.setdefault(described.tokenizer or version_id, TokenBytes())
        if not vocabulary and described.piece_ends:
            vocabulary.fill(described)
        if vocabulary:
            bare = msgspec.structs.replace(described, pieces=b"", piece_ends=b"", control=b"")
            self.described[version_id] = bare
            self._on_change()

    def forget(self, version_id: str) -> None:
        """The version is unloaded."""
        self.described.pop(version_id, None)
        self.states.pop(version_id, None)
        self.refused.pop(version_id, None)
        self._forget_vocabularies()
        self._tokenizer.forget(version_id)
        self._on_change()

    def _forget_vocabularies(self) -> None:
        """Drop vocabularies without a loaded version, except the most recently used ones."""
        in_use = {described.tokenizer or name for name, described in self.described.items()}
        # A reader waits for an empty one; there are no more of them than requests in the journal.
        old = [name for name, vocabulary in self.vocabularies.items() if vocabulary and name not in in_use]
        used = [name for name in old if self.vocabularies[name].is_used]
        for name in {*old} - {*used[-MAX_OLD_VOCABULARIES:]}:
            del self.vocabularies[name]
