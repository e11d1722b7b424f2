"""The scheduler's two helper processes for constraints, and what connects them with the engines."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeline import procfs
from pipeline.config.schema import Config
from pipeline.files import DiskErrors, replace_file
from pipeline.ipc.helper_process import Callbacks, HelperProcess, Loop
from pipeline.protocol.messages import ModelVocabulary
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints.constraints import Constraints, charge_death, owed_since
from stages.scheduler.constraints.mask_progress import MaskProgress
from stages.scheduler.constraints.vetting import Vetting

log = logging.getLogger("starling.scheduler")

RETRY_S = 1.0  # between two attempts to write a vocabulary's file, and the Retry-After of requests that wait for it
_PROGRAM = "stages.scheduler.constraints.helper_main"


class _Unstored(NamedTuple):
    """A vocabulary whose file could not be written yet. Gateways send it once, so it is kept."""

    path: Path
    data: bytes
    constraints: Constraints


class ConstraintHelpers:
    """One for each scheduler. `engines()` yields the constraints of every engine."""

    def __init__(self, config: Config, loop: Loop, engines: Callable[[], Iterable[Constraints]]) -> None:
        bounds = config.scheduler.constraints
        self.vetting = Vetting(bounds.compile_timeout_ms / 1000)
        self._progress = MaskProgress(bounds.compile_timeout_ms / 1000)
        self._clock = loop.clock
        self._engines = engines
        self._vocabularies: dict[str, f.Vocabulary] = {}  # by version
        self._unstored: dict[str, _Unstored] = {}  # by version
        self._next_attempt = float("-inf")
        self._errors = DiskErrors(log, "requests with constraints get 503 until the vocabulary is stored")
        numbers = tuple(map(str, (bounds.memory_mb, bounds.max_cached, bounds.max_cached_per_tenant)))
        self._masks = HelperProcess(
            _PROGRAM, ("mask", *numbers), loop, Callbacks(self._on_mask_packet, self._replay, self._on_masks_died)
        )
        self._trial = HelperProcess(
            _PROGRAM,
            ("vet", *numbers),
            loop,
            Callbacks(self._on_trial_packet, self._describe, lambda: self.vetting.on_died(self._clock())),
        )

    def add_vocabulary(self, frame: ModelVocabulary, path: Path, constraints: Constraints) -> None:
        """A gateway sent the vocabulary of a version; `path` is for its file. If that fails, ticks try again."""
        file = f.VocabularyFile(frame.pieces, frame.piece_ends, frame.control, frame.eos_ids)
        self._unstored[frame.model] = _Unstored(path, msgspec.msgpack.encode(file), constraints)
        self._store(frame.model)

    def _store(self, version: str) -> None:
        path, data, constraints = self._unstored[version]
        stored: bytes | None = None
        with suppress(OSError):  # there is none, or it cannot be read: it is replaced
            stored = path.read_bytes()
        try:
            if stored != data:
                replace_file(path, data, of_run=True)  # helpers may be reading the old one
        except OSError as error:
            self._errors.failed("write", path, error)
            self._next_attempt = self._clock() + RETRY_S
            return
        self._errors.worked("write")
        del self._unstored[version]
        known = f.Vocabulary(version, str(path))
        self._vocabularies[version] = known
        constraints.set_vocabulary(known.path)
        if self._trial.pid:
            self._trial.send(f.packets([known]))

    def forget(self, version: str) -> None:
        """The version is unloaded: its file is removed, and the helpers drop its step arena, sequences and grammars.

        Call when its engine is gone: frames that the engine has not sent, such as `Close`, need not be sent any more.
        """
        self.vetting.forget(version)
        self._unstored.pop(version, None)
        known = self._vocabularies.pop(version, None)
        if known is not None:
            Path(known.path).unlink(missing_ok=True)
        for helper in (self._masks, self._trial):
            if helper.pid:  # a new one gets the loaded versions only
                helper.send(f.packets([f.Forget(version)]))

    def send(self) -> None:
        """Send what the engines have for the helpers. Call at the end of each round."""
        if self.vetting.frames and self._trial.ensure_started():
            frames, self.vetting.frames = self.vetting.frames, []
            self._trial.send(f.packets(frames))
        for constraints in self._engines():
            if not constraints.frames:
                continue
            if not self._masks.pid and not constraints.is_used:
                constraints.frames.clear()  # a new process gets everything from `replay`
            elif self._masks.ensure_started():
                frames, constraints.frames = constraints.frames, []
                self._masks.send(f.packets(frames))

    def tick(self, now: float) -> None:
        """At each tick: files to write, helpers that hang, and those that have ended while they are needed."""
        if self._unstored and now >= self._next_attempt:
            for version in list(self._unstored):
                self._store(version)
        self._masks.flush()
        self._trial.flush()
        if self.vetting.is_busy and self.vetting.is_late(now, self._trial_cpu_s()):
            self._trial.kill()
            self.vetting.on_late(now)
        if self._hangs(now):
            log.warning("the mask process hangs, and is replaced")
            self._masks.kill()
            self._on_masks_died()
        if not self._masks.pid and any(constraints.is_used for constraints in self._engines()):
            self._masks.ensure_started()
        self.send()

    def close(self) -> None:
        """End both processes."""
        self._masks.kill()
        self._trial.kill()

    def _hangs(self, now: float) -> bool:
        """The mask process owes masks and makes no progress."""
        since = owed_since(self._engines())
        if since == math.inf or not self._masks.pid:
            return False
        return self._progress.is_stuck(since, now, procfs.cpu_s(self._masks.pid))

    def _trial_cpu_s(self) -> float:
        return procfs.cpu_s(self._trial.pid) if self._trial.pid else 0.0

    def _describe(self) -> None:
        self._trial.send(f.packets(self._vocabularies.values()))

    def _replay(self) -> None:
        now = self._clock()
        for constraints in self._engines():
            constraints.replay(now)
            constraints.flush(now)

    def _on_masks_died(self) -> None:
        compiling = self._progress.compiling
        self._progress.restart()
        charge_death(list(self._engines()), compiling)

    def _on_trial_packet(self, packet: bytes) -> None:
        for frame in f.decode_answers(packet):
            if isinstance(frame, f.Begun):
                self.vetting.on_begun(frame, self._trial_cpu_s())
            elif isinstance(frame, f.Vetted):
                self.vetting.on_vetted(frame, self._clock())

    def _on_mask_packet(self, packet: bytes) -> None:
        for frame in f.decode_answers(packet):
            if isinstance(frame, f.Compiling):
                self._progress.on_compiling(frame, self._clock())
            elif isinstance(frame, f.Compiled):
                self._progress.on_compiled(frame, self._clock())
            for constraints in self._engines():
                if isinstance(frame, f.Kept):
                    constraints.on_kept(frame)
                elif isinstance(frame, f.Failed):
                    constraints.on_failed(frame)
