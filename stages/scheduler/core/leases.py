"""Pages: what has been asked of `kv`, what it granted, and what it must be told after it has died.

One `Acquire` when a sequence is taken up, an `Extend` ahead of need for every few pages after that,
`Commit` when pages have filled, `Release` once no unacknowledged step names the sequence.  An answer is
matched by id; one that nobody waits for (the sequence went, kv started afresh) is ignored.

Every granted table is checked before a worker may use it: bounds, no page twice, the same pages
as before in front, enough of them.  A table that fails is never written to the row.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.protocol.messages import Acquire, Commit, Extend, Frame, Granted, KvReady, Reconcile, Release
from stages.scheduler.core.sequence import NEVER, Sequence

LONGEST_STRIDE = 128  # positions asked for at once, at most (but at least a page)
AHEAD = 16  # positions before the lease's end at which more are asked for


class BadTableError(ValueError):
    """A page table that must not reach a worker, and what is wrong with it."""


class Leases:
    """The pages of one model. Frames to send gather in `frames`, in order."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.frames: list[Frame] = []
        self.is_up = False  # kv has the arena and knows our leases
        self.page_tokens = 0
        self.total_pages = 0
        self.stride = 1  # pages that an ask takes beyond what is needed now: fewer asks if many are free
        self._next_id = 1
        self._waiting: dict[int, Sequence] = {}  # by id of the unanswered ask
        self._asks: dict[int, Acquire | Extend] = {}

    @property
    def capacity(self) -> int:
        """Positions that the whole arena holds."""
        return self.page_tokens * self.total_pages

    @property
    def unanswered(self) -> int:
        return len(self._asks)

    def room(self, free_pages: int, holders: int) -> None:
        """How many pages are free or evictable, and how many sequences grow into them."""
        most = max(1, LONGEST_STRIDE // max(1, self.page_tokens))
        self.stride = max(1, min(most, free_pages // (8 * max(1, holders))))

    # -------------------------------------------------------------- asking

    def acquire(self, sequence: Sequence) -> None:
        """First pages, for all that is known and some beyond: its tokens stand in its row."""
        want = min(sequence.length + self.stride * self.page_tokens, sequence.end - 1)
        self._ask(
            sequence,
            Acquire(
                self._next_id,
                self.model,
                sequence.lease,
                sequence.row,
                sequence.length,
                want,
                sequence.salt,
            ),
        )

    def extend(self, sequence: Sequence) -> None:
        """More pages (up to its limit)."""
        want = min(sequence.leased + self.stride * self.page_tokens, sequence.end - 1)
        sequence.extend_at = NEVER
        self._ask(sequence, Extend(self._next_id, self.model, sequence.lease, want))

    def _ask(self, sequence: Sequence, frame: Acquire | Extend) -> None:
        sequence.ask = frame.id
        self._waiting[frame.id] = sequence
        self._asks[frame.id] = frame
        self._next_id += 1
        if self.is_up:
            self.frames.append(frame)

    def commit(self, sequence: Sequence) -> None:
        """Pages that have filled since the last time may be indexed."""
        sequence.committed = sequence.computed
        if self.is_up and sequence.pages:  # of one that is being set aside they may be gone already
            self.frames.append(Commit(self.model, sequence.lease, sequence.computed))

    def release(self, sequence: Sequence) -> bool:
        """Give the pages back; nothing names them any more. False: there are none."""
        if not sequence.pages and not sequence.ask:
            return False
        if sequence.ask:
            self._waiting.pop(sequence.ask, None)
            self._asks.pop(sequence.ask, None)
            sequence.ask = 0
        # While kv is down nothing is said: it learns from the declaration what still holds.
        if self.is_up:
            good = min(sequence.computed, sequence.valid_end)
            self.frames.append(Release(self.model, sequence.lease, good))
        return True

    # -------------------------------------------------------------- answers

    def answered(self, answer_id: int) -> tuple[Sequence, bool] | None:
        """Whose ask that was, and whether its first; None when nobody waits for it."""
        frame = self._asks.pop(answer_id, None)
        if frame is None:
            return None
        sequence = self._waiting.pop(answer_id)
        sequence.ask = 0
        return sequence, isinstance(frame, Acquire)

    @staticmethod
    def is_early(sequence: Sequence) -> bool:
        """It does not need more pages yet, and has asked only because another one did."""
        return sequence.planned <= sequence.leased - AHEAD

    @staticmethod
    def ask_later(sequence: Sequence) -> None:
        """When it will need them."""
        sequence.extend_at = sequence.leased - AHEAD

    def take(self, sequence: Sequence, frame: Granted) -> None:
        """Enter the granted table into the sequence. Raises `BadTableError`, then nothing is changed."""
        pages, total = frame.pages, self.total_pages
        if len(set(pages)) != len(pages):
            raise BadTableError(f"{sequence.lease}: a page is granted twice")
        if any(not 0 <= page < total for page in pages):
            raise BadTableError(f"{sequence.lease}: a page outside 0..{total - 1} is granted")
        if pages[: len(sequence.pages)] != sequence.pages:
            raise BadTableError(f"{sequence.lease}: pages in use were replaced")
        if not 0 <= frame.cached_tokens <= min(sequence.length - 1, len(pages) * self.page_tokens):
            raise BadTableError(f"{sequence.lease}: {frame.cached_tokens} of {sequence.length} tokens cached")
        sequence.pages = pages
        sequence.leased = min(len(pages) * self.page_tokens, NEVER)
        sequence.is_starved = False
        sequence.extend_at = sequence.leased - AHEAD if sequence.leased < sequence.end - 1 else NEVER

    # -------------------------------------------------------------- kv's life

    def down(self) -> None:
        """kv is gone: asks stay open, steps go on with the pages they have."""
        self.is_up = False
        self.frames.clear()  # the declaration to its successor says it all

    def up(self, frame: KvReady, holders: Iterable[Sequence]) -> None:
        """kv has the arena: declare what is held if it wants to know, then ask again."""
        self.page_tokens = frame.page_tokens
        self.total_pages = frame.pages
        if not frame.reconciled:
            leases = [(s.lease, s.row, s.computed, s.pages) for s in holders if s.pages]
            self.frames.append(Reconcile(self.model, leases))
        elif self.is_up:
            return
        # Frames keep their order: what follows the declaration is read after it.
        self.is_up = True
        self.frames.extend(self._asks.values())
