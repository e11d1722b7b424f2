"""The mask process's state: an automaton for each sequence, and the masks that it writes into the step arena.

An automaton's state is a function of the sequence's output tokens, which are read from the row.  A new process, or a
sequence that continues after a recovery, therefore gets there by consuming them again.

While masks are computed, a compiled grammar keeps what has been found out about texts, for all its sequences.  That
makes masks quick, takes memory, and counts for the library's limits: constraints can be made to use up both.  So
grammars are compiled again when they take too much memory, and, when a mask is beyond a limit, once for its sequence
alone.  Whether a sequence fails does not depend on the masks before, on draft tokens, or on other sequences.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipeline.procfs import anonymous_bytes
from pipeline.protocol.messages import Constraint, Frame, ReasoningPrefix
from pipeline.runtime.malloc_trim import trim
from shm.arena import Arena, ArenaError
from shm.step_ring import MASK_SLOTS, SERIAL, Steps, attach_steps, begun_tag, mask_tag
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import grammar
from stages.scheduler.constraints.compile_turns import CompileTurns

GrammarKey = tuple[str, str, str, ReasoningPrefix | None]  # version, kind, text, what stands before it
Compile = Callable[[str, Callable[[], Any]], "Future[Any]"]  # for a sequence


class _OtherSequenceError(Exception):
    """The row belongs to another sequence: the one that the mask is for was preempted, and asks again later."""


class _Vocabulary:
    """The tokens of a version, and the tokenizer, which the first compilation makes."""

    __slots__ = ("file", "tokenizer")

    def __init__(self, file: f.VocabularyFile, tokenizer: Any) -> None:
        self.file, self.tokenizer = file, tokenizer


class _Version:
    """What is known of a model version, until it is unloaded."""

    __slots__ = ("arena", "steps", "vocabulary")

    def __init__(self) -> None:
        self.vocabulary: _Vocabulary | None = None
        self.arena: Arena | None = None  # that `steps` are in, and that is unmapped with their last view
        self.steps: Steps | None = None


class _Sequence:
    """One open sequence."""

    __slots__ = ("consumed", "failed", "is_alone", "key", "matcher", "pending", "recompiled", "source", "tenant")

    def __init__(self, key: GrammarKey, tenant: str) -> None:
        self.key, self.tenant = key, tenant
        self.matcher: Any = None
        self.source: Future[Any] | None = None  # the compiled grammar that the automaton is of
        self.is_alone = False  # it needs the grammar for itself, after a limit was reached
        self.recompiled: Future[Any] | None = None  # that grammar
        self.consumed = 0  # output tokens
        self.failed: Future[Any] | None = None  # the compilation that has failed for another reason than the grammar
        self.pending: f.Mask | None = None  # until the grammar is compiled

    def forget_matcher(self) -> None:
        """The next mask makes the automaton again."""
        self.matcher, self.source, self.consumed = None, None, 0


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
        max_bytes: int = 0,
        used_bytes: Callable[[], int] = anonymous_bytes,
    ) -> None:
        """`compile_later(sequence, function)` runs `function` on a thread; then call `compiled`.

        One compilation runs at a time, and tenants take turns, each for the first of its sequences that wait.

        Grammars that no sequence uses are kept up to the two numbers, the latest ones. When the process has come to use
        `max_bytes` more than now, all compiled grammars and automata are dropped; 0: no bound.
        """
        self.answers: list[Frame] = []
        self._compile_later = compile_later
        self._max_grammars, self._max_tenant_grammars = max_grammars, max_tenant_grammars
        self._max_bytes, self._used_bytes = max_bytes, used_bytes
        self._floor = used_bytes() if max_bytes else 0  # least that was used since automata were dropped
        self._versions: dict[str, _Version] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._grammars: OrderedDict[GrammarKey, _Grammar] = OrderedDict()  # by last use
        self._turns = CompileTurns()
        self._compiling: Future[Any] | None = None  # what the thread compiles

    def handle(self, frame: f.ToHelper) -> None:
        """Process one frame of the scheduler. A frame about a sequence that is not open is late and has no effect."""
        if isinstance(frame, f.Mask):
            sequence = self._sequences.get(frame.sequence)
            if sequence is not None:
                sequence.pending = frame
                self._advance(frame.sequence, sequence)
        elif isinstance(frame, f.Open):
            self._open(frame)
        elif isinstance(frame, f.Close):
            self._close(frame.sequence)
        elif isinstance(frame, f.Vocabulary):
            with contextlib.suppress(FileNotFoundError):  # the version has been unloaded meanwhile
                self.set_vocabulary(frame.version, read_vocabulary(frame.path))
        elif isinstance(frame, f.Rows):
            with contextlib.suppress(FileNotFoundError, ArenaError):  # unloaded, or replaced: that has its own frame
                arena, steps, _ = attach_steps(Path(frame.path))
                self.set_rows(frame.version, steps, arena)
        elif isinstance(frame, f.Forget):
            self._forget(frame.version)

    def set_rows(self, version: str, steps: Steps, arena: Arena | None = None) -> None:
        """Masks of that version are written here from now on."""
        known = self._versions.setdefault(version, _Version())
        known.steps, known.arena = steps, arena
        self.compiled()

    def set_vocabulary(self, version: str, file: f.VocabularyFile, tokenizer: Any = None) -> None:
        """What the version's token ids mean. `tokenizer`: if it is made already."""
        self._versions.setdefault(version, _Version()).vocabulary = _Vocabulary(file, tokenizer)

    def _forget(self, version: str) -> None:
        """Drop what there is of the version: its tokens, step arena, sequences and grammars."""
        self._versions.pop(version, None)
        for name in [name for name, one in self._sequences.items() if one.key[0] == version]:
            self._close(name)
        for key in [key for key in self._grammars if key[0] == version]:
            del self._grammars[key]

    def compiled(self) -> None:
        """Some grammar is compiled: write the masks that wait for it."""
        for name, sequence in list(self._sequences.items()):
            if sequence.pending is not None:
                self._advance(name, sequence)
        if self._compiling is not None and self._compiling.done():
            self._compiling = None  # not before: what it was compiled for as well needs no turn any more
        self._compile_next()

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
        self._sequences[frame.sequence] = _Sequence(key, frame.tenant)

    def _close(self, name: str) -> None:
        sequence = self._sequences.pop(name, None)
        if sequence is not None:
            self._turns.discard(sequence.tenant, name)
            self._grammars[sequence.key].users -= 1
            self._evict()

    def limit_memory(self) -> None:
        """Call after each packet: drops automata and compiled grammars if they take too much memory."""
        if not self._max_bytes:
            return
        used = self._used_bytes()
        self._floor = min(self._floor, used)
        if used - self._floor <= self._max_bytes:
            return
        for sequence in self._sequences.values():
            sequence.forget_matcher()
        for key, known in list(self._grammars.items()):
            if not known.users:
                del self._grammars[key]
            elif known.compiled is not None and known.compiled.done():
                known.compiled = None
        trim()
        self._floor = self._used_bytes()  # what else the process has come to use is not to be freed

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

    def _advance(self, name: str, sequence: _Sequence) -> None:
        """Write the mask that the sequence waits for, as soon as its grammar is compiled."""
        frame, known = sequence.pending, self._grammars[sequence.key]
        version = self._versions.get(sequence.key[0])
        steps = version.steps if version is not None else None
        if frame is None or steps is None:
            return
        if self._grammar_of(sequence) is None:
            self._turns.add(sequence.tenant, name)
            self._compile_next()
        compiled = self._grammar_of(sequence)
        if compiled is None or not compiled.done():
            return
        self._turns.discard(sequence.tenant, name)  # it was compiled for another sequence
        try:
            self._write(sequence, frame, steps, compiled)
        except grammar.GrammarError as error:
            source = sequence.source
            sequence.forget_matcher()
            if compiled is sequence.recompiled:
                self._fail(name, error, "INVALID_REQUEST")
                return
            if source is known.compiled or source is None:  # otherwise another sequence has had it compiled again
                sequence.is_alone = True
            self._advance(name, sequence)
        except _OtherSequenceError:
            sequence.pending = None
        except Exception as error:
            if compiled.exception() is not None and self._compile_again(sequence, known, compiled):
                self._advance(name, sequence)
            else:
                self._fail(name, error, "INFERENCE")
        else:
            if sequence.recompiled is not None:
                known.compiled, sequence.recompiled, sequence.is_alone = sequence.recompiled, None, False
            sequence.pending = None
            if frame.drafts:
                self._write_after_drafts(sequence, frame, steps)

    def _compile_again(self, sequence: _Sequence, known: _Grammar, failed: Future[Any]) -> bool:
        """Forget a compilation that failed for lack of memory, for instance. False: the sequence had another one."""
        if known.compiled is failed:
            known.compiled = None
        if sequence.recompiled is failed:
            sequence.recompiled = None
        is_first, sequence.failed = sequence.failed is None, failed
        return is_first

    def _grammar_of(self, sequence: _Sequence) -> Future[Any] | None:
        """The grammar to be used for its next mask; None: its compilation has not begun."""
        return sequence.recompiled if sequence.is_alone else self._grammars[sequence.key].compiled

    def _compile_next(self) -> None:
        """Begin the compilation whose turn it is, unless one runs."""
        while self._compiling is None:
            name = self._turns.take()
            if name is None:
                return
            sequence = self._sequences[name]
            version = self._versions[sequence.key[0]]
            if version.steps is None:
                continue
            if self._grammar_of(sequence) is not None:  # another sequence's own one has become that of all
                self._advance(name, sequence)
                continue
            known, vocabulary = self._grammars[sequence.key], version.vocabulary
            compiled = self._compile_later(
                name, partial(_compile, vocabulary, known.constraint, 32 * version.steps.masks.shape[2])
            )
            self._compiling = None if compiled.done() else compiled
            if sequence.is_alone:
                sequence.recompiled = compiled
            else:
                known.compiled = compiled

    def _fail(self, name: str, error: Exception, code: str) -> None:
        self.answers.append(f.Failed(name, grammar.first_line(str(error)), code))
        self._close(name)

    def _write(self, sequence: _Sequence, frame: f.Mask, steps: Steps, compiled: Future[Any]) -> None:
        """Write the mask after the known tokens. Raises `GrammarError`, and `_OtherSequenceError`."""
        new = steps.tokens[frame.row, frame.prompt_len + sequence.consumed : frame.length].tolist()
        # After the copy: the scheduler stores the serial number of a row's new sequence before its tokens.
        if frame.serial and int(steps.row_ints[frame.row, SERIAL]) != frame.serial:
            raise _OtherSequenceError
        with _begun(steps, frame, frame.length):
            if sequence.matcher is None:
                sequence.matcher, sequence.source = compiled.result().deep_copy(), compiled
            matcher = sequence.matcher
            if new and not matcher.consume_tokens(new):
                grammar.check(matcher)
                raise RuntimeError("the sequence's tokens are not those of its masks")
            sequence.consumed = frame.length - frame.prompt_len
            write_mask(matcher, steps, frame.row, frame.length, frame.epoch)

    def _write_after_drafts(self, sequence: _Sequence, frame: f.Mask, steps: Steps) -> None:
        """Write the masks after the draft tokens that the constraint allows, as far as the limits let it."""
        matcher, kept, tried = sequence.matcher, 0, 0
        try:
            for token in frame.drafts[: MASK_SLOTS - 1]:
                with _begun(steps, frame, frame.length + tried + 1):
                    if matcher.is_stopped() or not matcher.try_consume_tokens([token]):
                        break
                    tried += 1
                    write_mask(matcher, steps, frame.row, frame.length + tried, frame.epoch)
                    kept = tried
        except grammar.GrammarError:
            pass
        except Exception:  # such as `MemoryError`: drafts are only for speed
            tried = 0  # but `kept` masks are in the row, and their epoch must not be used without the drafts
            sequence.forget_matcher()
        if matcher.is_error() or (tried and not matcher.rollback(tried)):
            sequence.forget_matcher()
        self.answers.append(f.Kept(frame.sequence, frame.epoch, kept))


def _compile(vocabulary: _Vocabulary | None, constraint: Constraint, n_tokens: int) -> Any:
    """On the compiling thread, which is the only one: it makes the tokenizer, too."""
    if vocabulary is None:
        raise RuntimeError("the vocabulary of the model is not there")
    if vocabulary.tokenizer is None:
        vocabulary.tokenizer = grammar.make_tokenizer(vocabulary.file, n_tokens)
    return grammar.new_matcher(vocabulary.tokenizer, constraint)


@contextlib.contextmanager
def _begun(steps: Steps, frame: f.Mask, known: int) -> Iterator[None]:
    """Mark the mask after `known` tokens as being computed: the scheduler sees it if the process ends meanwhile."""
    place, tag = (frame.row, known % MASK_SLOTS), begun_tag(frame.serial)
    steps.mask_ready[place] = tag
    try:
        yield
    finally:
        if steps.mask_ready[place] == tag:
            steps.mask_ready[place] = 0


def write_mask(matcher: Any, steps: Steps, row: int, known: int, epoch: int) -> None:
    """Write the automaton's mask for the token after `known` tokens of the row, within `_begun`.

    Raises `GrammarError`.
    """
    slot = known % MASK_SLOTS
    mask = steps.masks[row, slot]
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    grammar.check(matcher)
    if not mask.any():
        raise grammar.GrammarError("no token of the vocabulary continues the text as the constraint demands")
    # After the mask: x86 keeps the order of stores.
    steps.mask_ready[row, slot] = mask_tag(epoch, known)


def read_vocabulary(path: str) -> f.VocabularyFile:
    """Raises `OSError` or `msgspec.DecodeError`."""
    return msgspec.msgpack.decode(Path(path).read_bytes(), type=f.VocabularyFile)
