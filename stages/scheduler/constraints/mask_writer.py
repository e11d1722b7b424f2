"""The mask process's state: an automaton for each sequence, and the masks that it writes into the step arena.

An automaton's state is a function of the sequence's output tokens, which are read from the row.  A new process, or a
sequence that continues after a recovery, therefore gets there by consuming them again.

Masks of sequences that were quick so far are computed together, on several threads.  Those of others are computed one
by one and timed; a sequence that stays slow is given up, and the process for slow masks continues it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import llguidance
import msgspec
import numpy as np

from pipeline.protocol.messages import Constraint, Frame, ReasoningPrefix
from shm.arena import Arena
from shm.step_ring import MASK_SLOTS, Steps, attach_steps, mask_tag
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import grammar

GrammarKey = tuple[str, str, str, ReasoningPrefix | None]  # version, kind, text, what stands before it
Compile = Callable[[Callable[[], Any]], "Future[Any]"]

SLOW_S = 0.002  # CPU time of a mask that counts as slow
STRIKES = 3  # slow masks, less the quick ones between, after which a sequence is slow
VERY_SLOW_S = 0.02  # such a mask counts as so many at once
TOGETHER_S = 0.004  # CPU time of masks computed together after which each is timed the next time
GROWTH_BYTES = 1 << 20  # and growth of the process


class Memory(NamedTuple):
    """What the process and one sequence may add to what the process has at first. `used()`: bytes it has now."""

    used: Callable[[], int]
    most: int
    most_of_sequence: int
    trim: Callable[[], None] = lambda: None  # return what is free


class _Sequence:
    """One open sequence."""

    __slots__ = ("consumed", "grown", "is_timed", "key", "matcher", "name", "pending", "strikes")

    def __init__(self, name: str, key: GrammarKey) -> None:
        self.name, self.key = name, key
        self.matcher: Any = None
        self.consumed = 0  # output tokens
        self.pending: f.Mask | None = None  # until the grammar is compiled
        self.is_timed = True  # its next mask is computed alone
        self.strikes = 0
        self.grown = 0  # bytes by which the process grew with its masks


class _Grammar:
    """A grammar that is compiled, or will be."""

    __slots__ = ("compiled", "constraint", "tenant", "users")

    def __init__(self, tenant: str, constraint: Constraint) -> None:
        self.tenant, self.constraint = tenant, constraint
        self.compiled: Future[Any] | None = None  # None: not begun
        self.users = 0  # open sequences


class MaskWriter:
    """Handles frames; answers gather in `answers`."""

    def __init__(
        self,
        compile_later: Compile,
        max_grammars: int,
        max_tenant_grammars: int,
        threads: int = 1,
        is_slow: bool = False,
        memory: Memory | None = None,
    ) -> None:
        """`compile_later(function)` runs `function` on a thread.

        Grammars that no sequence uses are kept up to the two numbers, the latest ones.
        threads: that compute masks together.
        is_slow: of the process for slow masks; it keeps all sequences, and answers every `Mask`.
        """
        self.answers: list[Frame] = []
        self._compile_later = compile_later
        self._max_grammars, self._max_tenant_grammars = max_grammars, max_tenant_grammars
        self._executor = llguidance.LLExecutor(threads) if threads > 1 else None
        self._is_slow = is_slow
        self._memory = memory
        self._base = self._used = memory.used() if memory is not None else 0
        self._due: dict[str, _Sequence] = {}  # a mask is to be written
        self._vocabularies: dict[str, f.VocabularyFile] = {}  # by version
        self._tokenizers: dict[str, Any] = {}
        self._arenas: dict[str, Arena] = {}
        self._rows: dict[str, Steps] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._grammars: OrderedDict[GrammarKey, _Grammar] = OrderedDict()  # by last use

    def handle(self, frame: f.ToHelper) -> None:
        """Process one frame of the scheduler; masks are written by `write`.

        A frame about a sequence that is not open is late and has no effect.
        """
        if isinstance(frame, f.Mask):
            sequence = self._sequences.get(frame.sequence)
            if sequence is not None:
                sequence.pending = frame
                self._due[frame.sequence] = sequence
        elif isinstance(frame, f.Open):
            self._open(frame)
        elif isinstance(frame, f.Close):
            self._close(frame.sequence)
        elif isinstance(frame, f.Vocabulary):
            self.set_vocabulary(frame.version, read_vocabulary(frame.path))
        elif isinstance(frame, f.Rows):
            arena, steps, _ = attach_steps(Path(frame.path))
            self._arenas[frame.version] = arena  # one that it replaces is unmapped with its last view
            self.set_rows(frame.version, steps)

    def set_rows(self, version: str, steps: Steps) -> None:
        """Masks of that version are written here from now on."""
        self._rows[version] = steps
        self.compiled()

    def set_vocabulary(self, version: str, file: f.VocabularyFile) -> None:
        """What the version's token ids mean."""
        self._vocabularies[version] = file
        self._tokenizers.pop(version, None)

    def compiled(self) -> None:
        """Some grammar is compiled: `write` the masks that wait for it."""
        self._due.update((name, one) for name, one in self._sequences.items() if one.pending is not None)

    # -------------------------------------------------------------- sequences and grammars

    def _open(self, frame: f.Open) -> None:
        self._close(frame.sequence)
        constraint = frame.constraint
        key = (frame.version, constraint.kind, constraint.text, constraint.after)
        known = self._grammars.get(key)
        if known is None:
            known = self._grammars[key] = _Grammar(frame.tenant, constraint)
        known.users += 1
        self._grammars.move_to_end(key)
        self._sequences[frame.sequence] = _Sequence(frame.sequence, key)

    def _compile(self, version: str, constraint: Constraint, mask_words: int) -> Any:
        """On the compiling thread, which is the only one: it makes the tokenizer, too."""
        tokenizer = self._tokenizers.get(version)
        if tokenizer is None:
            tokenizer = grammar.make_tokenizer(self._vocabularies[version], 32 * mask_words)
            self._tokenizers[version] = tokenizer
        return grammar.new_matcher(tokenizer, constraint)

    def _close(self, name: str) -> None:
        sequence = self._sequences.pop(name, None)
        self._due.pop(name, None)
        if sequence is not None:
            self._grammars[sequence.key].users -= 1
            self._evict()

    def _evict(self) -> None:
        """Drop unused grammars beyond the bounds, the least recently used ones first."""
        unused = [key for key, one in self._grammars.items() if not one.users]
        counts: dict[str, int] = {}
        for key in unused:
            tenant = self._grammars[key].tenant
            counts[tenant] = counts.get(tenant, 0) + 1
        excess = len(unused) - self._max_grammars
        for key in unused:
            tenant = self._grammars[key].tenant
            if excess > 0 or counts[tenant] > self._max_tenant_grammars:
                del self._grammars[key]
                counts[tenant] -= 1
                excess -= 1

    # -------------------------------------------------------------- masks

    def write(self) -> None:
        """Write the masks that are due and whose grammars are compiled, those of quick sequences first."""
        due, self._due = self._due, {}
        ready = [sequence for sequence in due.values() if self._is_compiled(sequence)]
        together: dict[str, list[_Sequence]] = {}
        alone = []
        for sequence in ready:
            frame = sequence.pending
            assert frame is not None
            if sequence.is_timed or frame.drafts or self._executor is None:
                alone.append(sequence)
            else:
                together.setdefault(sequence.key[0], []).append(sequence)
        for version, sequences in together.items():
            self._write_together(sequences, self._rows[version])
        for sequence in sorted(alone, key=lambda one: one.strikes):
            self._write_alone(sequence, self._rows[sequence.key[0]])

    def _is_compiled(self, sequence: _Sequence) -> bool:
        """Whether the mask that the sequence waits for can be computed. Begins to compile its grammar."""
        known, version = self._grammars[sequence.key], sequence.key[0]
        steps = self._rows.get(version)
        if sequence.pending is None or steps is None:
            return False
        if known.compiled is None:
            words = steps.masks.shape[2]
            known.compiled = self._compile_later(lambda: self._compile(version, known.constraint, words))
        return known.compiled.done()

    def _fail(self, sequence: _Sequence, error: Exception | str) -> None:
        self.answers.append(f.Failed(sequence.name, grammar.first_line(str(error))))
        self._close(sequence.name)

    def _consume(self, sequence: _Sequence, steps: Steps) -> f.Mask:
        """Consume the tokens before the mask that the sequence waits for; returns its frame."""
        frame = sequence.pending
        assert frame is not None
        sequence.pending = None
        if sequence.matcher is None:
            compiled = self._grammars[sequence.key].compiled
            assert compiled is not None
            sequence.matcher = compiled.result().deep_copy()
        new = steps.tokens[frame.row, frame.prompt_len + sequence.consumed : frame.length].tolist()
        if new and not sequence.matcher.consume_tokens(new):
            raise grammar.GrammarError(sequence.matcher.get_error())
        sequence.consumed = frame.length - frame.prompt_len
        return frame

    def _write_together(self, sequences: list[_Sequence], steps: Steps) -> None:
        """Write the masks of sequences that were quick so far."""
        begun = time.process_time()
        jobs: list[tuple[_Sequence, f.Mask]] = []
        for sequence in sequences:
            try:
                jobs.append((sequence, self._consume(sequence, steps)))
            except Exception as error:
                self._fail(sequence, error)
        slots = [frame.length % MASK_SLOTS for _, frame in jobs]
        for (_, frame), slot in zip(jobs, slots, strict=True):
            steps.mask_ready[frame.row, slot] = 0
        rows, _, words = steps.masks.shape
        places = [
            (sequence.matcher, frame.row * MASK_SLOTS + slot)
            for (sequence, frame), slot in zip(jobs, slots, strict=True)
        ]
        assert self._executor is not None
        self._executor.unsafe_compute_mask_ptr(places, steps.masks.ctypes.data, 4 * words, rows * MASK_SLOTS)
        for sequence, frame in jobs:
            try:
                _publish(sequence.matcher, steps, frame.row, frame.length, frame.epoch)
            except grammar.GrammarError as error:
                self._fail(sequence, error)
        if time.process_time() - begun > TOGETHER_S or self._grew() > GROWTH_BYTES:
            for sequence in sequences:
                sequence.is_timed = True

    def _write_alone(self, sequence: _Sequence, steps: Steps) -> None:
        """Write the mask of one sequence, and those after its draft tokens; give it up if it is slow or too large."""
        begun = time.thread_time()
        try:
            frame = self._consume(sequence, steps)
            write_mask(sequence.matcher, steps, frame.row, frame.length, frame.epoch)
            if frame.drafts:
                self._write_drafts(sequence, frame, steps)
            elif self._is_slow:
                self.answers.append(f.Kept(sequence.name, frame.epoch, 0))  # it is waited for
            self._account(sequence)
        except Exception as error:
            self._fail(sequence, error)
            return
        took_s = (time.thread_time() - begun) / (1 + len(frame.drafts))
        if took_s < SLOW_S:
            sequence.strikes = max(0, sequence.strikes - 1)
        else:
            sequence.strikes += STRIKES if took_s > VERY_SLOW_S else 1
        sequence.is_timed = sequence.strikes > 0
        if sequence.strikes >= STRIKES and not self._is_slow:
            self.answers.append(f.Slow(sequence.name))
            self._close(sequence.name)

    def _write_drafts(self, sequence: _Sequence, frame: f.Mask, steps: Steps) -> None:
        matcher, kept = sequence.matcher, 0
        for token in frame.drafts[: MASK_SLOTS - 1]:
            if matcher.is_stopped() or not matcher.try_consume_tokens([token]):
                break
            kept += 1
            write_mask(matcher, steps, frame.row, frame.length + kept, frame.epoch)
        if kept and not matcher.rollback(kept):
            raise grammar.GrammarError(matcher.get_error())
        self.answers.append(f.Kept(frame.sequence, frame.epoch, kept))

    # -------------------------------------------------------------- memory

    def _grew(self) -> int:
        """Bytes by which the process has grown since the last call."""
        if self._memory is None:
            return 0
        before, self._used = self._used, self._memory.used()
        return self._used - before

    def _account(self, sequence: _Sequence) -> None:
        """Count how much memory its mask took. Raises `GrammarError` if the sequence has too much."""
        memory, grown = self._memory, self._grew()
        if memory is None or grown <= 0:
            return
        sequence.grown += grown
        if sequence.grown > memory.most_of_sequence:
            raise grammar.GrammarError(f"its masks take more than {memory.most_of_sequence >> 20} MB of memory")
        if self._used - self._base <= memory.most:
            return
        memory.trim()
        self._grew()
        if self._used - self._base <= memory.most:
            return
        largest = max(self._sequences.values(), key=lambda one: one.grown)
        error = f"the masks of all requests take more than {memory.most >> 20} MB of memory, and its own the most"
        if largest is sequence:
            raise grammar.GrammarError(error)
        self._fail(largest, error)


def write_mask(matcher: Any, steps: Steps, row: int, known: int, epoch: int) -> None:
    """Write the automaton's mask for the token after `known` tokens of the row. Raises `GrammarError`."""
    slot = known % MASK_SLOTS
    mask = steps.masks[row, slot]
    steps.mask_ready[row, slot] = 0
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    _publish(matcher, steps, row, known, epoch)


def _publish(matcher: Any, steps: Steps, row: int, known: int, epoch: int) -> None:
    """The mask is computed: set its tag. Raises `GrammarError`."""
    slot = known % MASK_SLOTS
    grammar.check(matcher)
    if not np.any(steps.masks[row, slot]):
        raise grammar.GrammarError("no token of the vocabulary continues the text as the constraint demands")
    # After the mask: x86 keeps the order of stores.
    steps.mask_ready[row, slot] = mask_tag(epoch, known)


def read_vocabulary(path: str) -> f.VocabularyFile:
    """Raises `OSError` or `msgspec.DecodeError`."""
    return msgspec.msgpack.decode(Path(path).read_bytes(), type=f.VocabularyFile)
