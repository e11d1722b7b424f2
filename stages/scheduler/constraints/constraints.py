"""Constraints of one engine's sequences: vetting before they are queued, then a token mask for every sample.

    submit --> hold until vetted --> Open --> Mask for each token, while the step that samples it computes --> Close

The mask process owns the automata; this side only counts.  A mask carries a tag: the number of tokens before it, and an
*epoch*, which names one continuation of the row's tokens.  It changes whenever masks of draft tokens that were not
accepted may be in the row.  A sample without its mask in time is void: its position is computed again when the mask is
there, so a slow automaton delays its own sequence and no other.

Pure: frames for the mask process gather in `frames`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from pipeline.protocol.messages import Constraint, Frame, Submit
from shm.step_ring import MASK_SLOTS
from stages.scheduler.constraints.frames import Close, Failed, Kept, Mask, Open, Rows, Vocabulary
from stages.scheduler.constraints.mask_state import Masks
from stages.scheduler.constraints.vetting import Vetting, VettingFullError, Waiter
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.policy.admission import Refusal

DRAFT_WAIT_S = 0.02  # for the answer about draft tokens; then the step goes without them
POLL_S = 0.0005  # between two checks for a mask that came too late
MAX_DEATHS = 5  # of the mask process while it worked for a sequence: then the sequence fails
MAX_EPOCH = (1 << 31) - 1  # an entry of a step has it in an i32; months pass before one is used again
MAX_HELD = 1024  # submissions whose constraints are being vetted; with more the tenant that has most loses its newest


class _Held(NamedTuple):
    gateway: bytes
    frame: Submit
    constraint: Constraint  # of the frame
    waiter: Waiter


class Constraints:
    """One for each engine. Without `vetting` constraints are refused."""

    def __init__(self, model: str, worker: WorkerLink, vetting: Vetting | None) -> None:
        self.frames: list[Frame] = []  # for the mask process
        self.fail: Callable[[SequenceState, str, str, str], None] = lambda sequence, code, message, param: None
        self._model = model
        self._worker = worker
        self._vetting = vetting
        self._vocabulary = self._rows = ""  # paths
        self._held: dict[str, _Held] = {}  # by sequence
        self._n_held = Counter[str]()  # by tenant
        self._open: dict[str, SequenceState] = {}
        self._dirty: dict[str, SequenceState] = {}  # a mask is to be asked for
        self._void: list[SequenceState] = []  # their masks came too late
        self._epochs = 0
        self._wait_until = 0.0  # some step waits for an answer about draft tokens

    @property
    def is_busy(self) -> bool:
        """Submissions wait for their constraints."""
        return bool(self._held)

    @property
    def is_used(self) -> bool:
        """Some sequence has a constraint."""
        return bool(self._open)

    # -------------------------------------------------------------- submissions

    def hold(
        self,
        gateway: bytes,
        frame: Submit,
        now: float,
        submit: Callable[[bytes, Submit, float], None],
        refuse: Callable[[bytes, Submit, Refusal], None],
    ) -> Refusal | bool:
        """True: the submission waits, and `submit` or `refuse` is called later; False: submit it; or why not.

        None of that name may wait.
        """
        constraint, vetting = frame.constraint, self._vetting
        if constraint is None:
            return False
        if vetting is None:
            return Refusal("INVALID_REQUEST", "constraints are not supported here", constraint.field)
        if not self._vocabulary:
            return Refusal("MODEL_UNAVAILABLE", "the model's vocabulary is not known yet", "model", 1.0)
        name = frame.sequence
        if frame.forced or vetting.has_passed(self._model, constraint):
            return False  # with forced tokens it was vetted before

        def on_vetted(error: str, then: float) -> None:
            self._take(name)
            if error:
                message = f"{constraint.field or constraint.kind} cannot be used: {error}"
                refuse(gateway, frame, Refusal("INVALID_REQUEST", message, constraint.field))
                return
            left_ms = frame.deadline_ms and max(1, frame.deadline_ms - int((then - now) * 1000))
            submit(gateway, msgspec.structs.replace(frame, deadline_ms=left_ms), then)

        def on_displaced() -> None:
            self._take(name)
            refuse(gateway, frame, _overloaded(constraint.field))

        waiter = Waiter(on_vetted, on_displaced)
        try:
            newest = self._newest_of_most(frame.tenant) if len(self._held) >= MAX_HELD else None
            vetting.vet(self._model, constraint, frame.tenant, waiter, now)
        except VettingFullError:
            return _overloaded(constraint.field)
        if newest is not None and self.cancel_held(newest.frame.sequence):  # unless its constraint was displaced
            newest.waiter.on_displaced()
        self._held[name] = _Held(gateway, frame, constraint, waiter)
        self._n_held[frame.tenant] += 1
        return True

    def _newest_of_most(self, tenant: str) -> _Held:
        """The submission that must go for one of `tenant`, which has none. Raises `VettingFullError` if none may."""
        if tenant in self._n_held:
            raise VettingFullError
        longest, most = max(self._n_held.items(), key=lambda item: item[1])
        if most < 2:
            raise VettingFullError
        return next(held for held in reversed(self._held.values()) if held.frame.tenant == longest)

    def _take(self, sequence: str) -> _Held | None:
        """The submission, which waits no more; None: it does not."""
        held = self._held.pop(sequence, None)
        if held is not None:
            tenant = held.frame.tenant
            self._n_held[tenant] -= 1
            if not self._n_held[tenant]:
                del self._n_held[tenant]
        return held

    def is_held(self, sequence: str) -> bool:
        """The submission waits for its constraint."""
        return sequence in self._held

    def take_held(self) -> list[tuple[bytes, Submit]]:
        """Give up all waiting submissions."""
        held = [(one.gateway, one.frame) for one in self._held.values()]
        for _, frame in held:
            self.cancel_held(frame.sequence)
        return held

    def cancel_held(self, sequence: str) -> bool:
        """The submission is not wanted any more. False: none of that name waits."""
        held = self._take(sequence)
        if held is not None and self._vetting is not None:
            self._vetting.cancel(self._model, held.constraint, held.waiter)
        return held is not None

    def drop_gateway(self, gateway: bytes) -> None:
        """The gateway is disconnected: it submits again what it still wants."""
        for name in [name for name, held in self._held.items() if held.gateway == gateway]:
            self.cancel_held(name)

    # -------------------------------------------------------------- sequences

    def open(self, sequence: SequenceState) -> None:
        """A sequence is live."""
        if sequence.constraint is not None:
            sequence.masks = Masks()
            self._open[sequence.id] = sequence
            self.frames.append(self._open_frame(sequence))

    def close(self, sequence: SequenceState) -> None:
        """A sequence is not live any more."""
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]
            self._dirty.pop(sequence.id, None)
            self.frames.append(Close(sequence.id))

    def restart(self, sequence: SequenceState) -> None:
        """The row holds the known tokens, and no step computes it: it is new, preempted, or its steps are void."""
        if sequence.masks is not None:
            self._renew(sequence)

    def advance(self, sequence: SequenceState) -> None:
        """More tokens are known."""
        masks = sequence.masks
        if masks is not None and not sequence.is_done:
            masks.deaths = 0
            if masks.has_drafts:
                self._renew(sequence)
            self._dirty[sequence.id] = sequence

    def mark_void(self, sequence: SequenceState) -> None:
        """A sample had no mask. The sequence pauses until it is there."""
        if not sequence.lacks_mask and not sequence.is_done:
            sequence.lacks_mask = True
            self._void.append(sequence)
            self._renew(sequence)

    def _renew(self, sequence: SequenceState) -> None:
        masks = sequence.masks
        assert masks is not None
        self._epochs = self._epochs % MAX_EPOCH + 1  # 0: no masks
        masks.epoch, masks.asked, masks.asked_at, masks.kept = self._epochs, (), -1, -1
        masks.has_drafts = False
        self._dirty[sequence.id] = sequence

    def flush(self, now: float) -> None:
        """Ask for the masks after the tokens that have become known. Call at the end of each round."""
        if not self._dirty:
            return
        for sequence in self._dirty.values():
            if sequence.run.row >= 0 and not sequence.is_done:
                self._ask(sequence, now)
        self._dirty.clear()

    def _ask(self, sequence: SequenceState, now: float, drafts: tuple[int, ...] = ()) -> None:
        masks, run = sequence.masks, sequence.run
        assert masks is not None
        masks.sent_length, masks.sent_at = run.length, now
        serial = self._worker.ring.serial(run.row) if self._worker.ring is not None else 0
        frame = Mask(sequence.id, run.row, sequence.prompt_len, run.length, masks.epoch, drafts, serial)
        self.frames.append(frame)

    # -------------------------------------------------------------- draft tokens

    def allow(self, sequence: SequenceState, drafts: tuple[int, ...], now: float) -> tuple[int, ...] | None:
        """Those of the first draft tokens that the constraint allows; None: the answer is still to come."""
        masks, length = sequence.masks, sequence.run.length
        assert masks is not None
        drafts = drafts[: MASK_SLOTS - 1]
        if not drafts or sequence.lacks_mask:
            return ()
        if masks.asked_at != length:
            self._renew(sequence)
            self._dirty.pop(sequence.id, None)
            masks.asked, masks.asked_at, masks.deadline = drafts, length, now + DRAFT_WAIT_S
            masks.has_drafts = True
            self._wait_until = max(self._wait_until, masks.deadline)
            self._ask(sequence, now, drafts)
            return None
        if masks.asked == drafts:
            if masks.kept >= 0:
                return drafts[: masks.kept]
            if now < masks.deadline:
                return None
        if masks.has_drafts:
            self._renew(sequence)  # masks of draft tokens that are not verified may be in the row
            masks.asked_at = length  # one attempt for each token
        return ()

    def skip_drafts(self, sequence: SequenceState) -> None:
        """The next step is published without the draft tokens that were asked for, whose masks may be in the row.

        The step behind it must not take such a mask for that of the token that is sampled now.
        """
        self._renew(sequence)

    # -------------------------------------------------------------- answers

    def on_kept(self, frame: Kept) -> None:
        """How many draft tokens are allowed."""
        sequence = self._open.get(frame.sequence)
        if sequence is not None and sequence.masks is not None and sequence.masks.epoch == frame.epoch:
            sequence.masks.kept = frame.count
            sequence.masks.has_drafts = frame.count > 0
            self._wait_until = 0.0

    def on_failed(self, frame: Failed) -> None:
        """No mask can be computed."""
        sequence = self._open.get(frame.sequence)
        if sequence is not None:
            field = sequence.constraint.field if sequence.constraint is not None else ""
            message = f"the output cannot be continued within {field}: {frame.reason}"
            self.fail(sequence, frame.code, message, field)

    def resume_void(self) -> None:
        """Sequences whose masks have come compute again."""
        if self._void:
            for sequence in self._void:
                if sequence.is_done or sequence.run.row < 0 or not self._is_owed(sequence):
                    sequence.lacks_mask = False
            self._void = [sequence for sequence in self._void if sequence.lacks_mask]

    def wait_s(self, now: float) -> float:
        """Seconds until a mask or an answer is looked for again; 0.0: nothing is waited for."""
        if self._void:
            return POLL_S
        return max(0.0, self._wait_until - now)

    def _is_owed(self, sequence: SequenceState) -> bool:
        masks, ring = sequence.masks, self._worker.ring
        if masks is None or ring is None or sequence.run.row < 0:
            return False
        return not ring.has_mask(sequence.run.row, masks.epoch, sequence.run.length)

    # -------------------------------------------------------------- the mask process

    def set_vocabulary(self, path: str) -> None:
        """The version's vocabulary is in this file."""
        self._vocabulary = path
        self.frames.append(Vocabulary(self._model, path))

    def set_rows(self, path: str) -> None:
        """The version has a new step arena."""
        self._rows = path
        self.frames.append(Rows(self._model, path))

    def replay(self, now: float) -> None:
        """The mask process is new: it gets everything again."""
        self.frames.clear()
        if self._vocabulary:
            self.set_vocabulary(self._vocabulary)
        if self._rows:
            self.set_rows(self._rows)
        self.frames.extend(self._open_frame(sequence) for sequence in self._open.values())
        self._dirty.update(self._open)

    def _open_frame(self, sequence: SequenceState) -> Open:
        assert sequence.constraint is not None
        return Open(sequence.id, self._model, sequence.tenant.name, sequence.constraint)

    def requested(self) -> list[SequenceState]:
        """Sequences whose masks have been asked for and are not there."""
        return [
            sequence
            for sequence in self._open.values()
            if sequence.masks is not None
            and sequence.masks.sent_length == sequence.run.length
            and self._is_owed(sequence)
        ]

    def in_progress(self, compiling: str) -> tuple[list[SequenceState], bool]:
        """Sequences that a mask process which has ended worked for, and whether it was computing a mask.

        These are the ones whose masks it was computing, and those that waited for the constraint that it was compiling,
        which it began for the sequence `compiling`. Sequences that have ended since are left out.
        """
        was_computing = False
        ring, first = self._worker.ring, self._open.get(compiling)
        found = {} if first is None else {first.id: first}
        if first is not None:
            found.update((one.id, one) for one in self.requested() if one.constraint == first.constraint)
        if ring is not None:
            for sequence in self._open.values():
                if sequence.run.row >= 0 and ring.is_mask_begun(sequence.run.row):
                    found[sequence.id] = sequence
            was_computing = ring.clear_begun_masks()
        return list(found.values()), was_computing

    def charge(self, sequences: list[SequenceState]) -> None:
        """The mask process has ended while it worked for these, which fail if it did so too often."""
        for sequence in sequences:
            masks = sequence.masks
            assert masks is not None
            masks.deaths += 1
            if masks.deaths > MAX_DEATHS:
                field = sequence.constraint.field if sequence.constraint is not None else ""
                message = f"the process that computes the token masks of {field} has died each time"
                self.fail(sequence, "INFERENCE", message, field)


def _overloaded(field: str) -> Refusal:
    return Refusal("OVERLOADED", "too many new constraints wait to be compiled", field, 1.0)


def owed_since(all_constraints: Iterable[Constraints]) -> float:
    """When the oldest mask that is not there was asked for; inf: all are there."""
    requested = (sequence.masks for constraints in all_constraints for sequence in constraints.requested())
    return min((masks.sent_at for masks in requested if masks is not None), default=math.inf)


def charge_death(all_constraints: Iterable[Constraints], compiling: str) -> None:
    """The mask process has ended: charge the sequences that it worked for, of every engine.

    If it worked for none, as when it ends at its start, all that wait for a mask are charged: none must wait for ever.
    """
    found = [(constraints, *constraints.in_progress(compiling)) for constraints in all_constraints]
    has_worked = bool(compiling) or any(was_computing for *_, was_computing in found)
    for constraints, sequences, _ in found:
        constraints.charge(sequences if has_worked else constraints.requested())
