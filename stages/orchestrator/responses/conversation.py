"""A conversation of a fleet as it is stored: one value, from which each change makes the next. Pure.

The items of a response are added together and once, however often an orchestrator adds them: the conversation remembers
which responses it has.  It remembers the last ones even if their items were deleted meanwhile, because a stream can be
read again after its end.  With them it remembers the digests of the bodies of keyed requests: a key gives the same id
again when the response is no longer stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.api.conversation_object import CONVERSATION_BYTES, Conversation, check_bounds, joined
from pipeline.api.item_pages import Page, list_body, unknown_after
from pipeline.api.requests.conversations import ConversationItem

MAX_ADDED = 256  # responses that are remembered: many times those whose streams engines keep for a conversation
_ID_DIGITS = 24  # of a response, at its end; the ids of its items contain them


def digits_of(name: str) -> str:
    """What the id of a response or request has in common with the ids of the items that it adds."""
    return name[-_ID_DIGITS:]


class StoredConversation(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A conversation with its items, oldest first."""

    id: str
    created: int  # s since 1970
    used: float  # s since 1970 of the last change
    metadata: bytes  # JSON
    items: tuple[ConversationItem, ...] = ()
    items_bytes: int = 0
    # The digits, and then the digest, of responses that have added theirs, or never will; the last ones.
    added: tuple[bytes, ...] = ()

    @property
    def shown(self) -> dict[str, Any]:
        """As clients see it."""
        return Conversation(self.id, self.created, self.metadata).shown

    @property
    def nbytes(self) -> int:
        """As bounds count them."""
        return len(self.metadata) + CONVERSATION_BYTES + self.items_bytes

    def changed(self, now: float, **fields: Any) -> StoredConversation:
        """The next value. `now`: s since 1970."""
        return msgspec.structs.replace(self, used=now, **fields)

    def with_items(self, items: Sequence[ConversationItem], now: float, max_bytes: int) -> StoredConversation:
        """With new items at the end. Raises `TooLargeError`."""
        nbytes = self.items_bytes + sum(item.size for item in items)
        made = self.changed(now, items=(*self.items, *items), items_bytes=nbytes)
        check_bounds(len(made.items), made.nbytes, max_bytes)
        return made

    def with_response(
        self, name: str, items: Sequence[ConversationItem], now: float, max_bytes: int, digest: bytes = b""
    ) -> StoredConversation:
        """With the items of a response; itself if it has had them. Raises `TooLargeError`."""
        if self.has_had(name):
            return self
        return self.with_items(items, now, max_bytes)._remembering(name, digest)

    def without_response(self, name: str, now: float, digest: bytes = b"") -> StoredConversation:
        """Without the items of a response, which will not be added any more either."""
        its = [item for item in self.items if _is_of(item, name)]
        if not its and self.has_had(name):
            return self
        return self._without(its, now)._remembering(name, digest)

    def taking_out(self, name: str, now: float) -> StoredConversation:
        """Without the items of a response, which may be added later; itself if it has none of them."""
        its = [item for item in self.items if _is_of(item, name)]
        return self._without(its, now).forgetting(name, now) if its else self

    def forgetting(self, name: str, now: float) -> StoredConversation:
        """With no memory of a response that is deleted, which may be made anew; itself if an item of it is left."""
        left = tuple(one for one in self.added if not one.startswith(_key_of(name)))
        if len(left) == len(self.added) or any(_is_of(item, name) for item in self.items):
            return self
        return self.changed(now, added=left)

    def without_item(self, item_id: str, now: float) -> StoredConversation:
        """Without an item; itself if it has none of this id."""
        item = self.find(item_id)
        return self._without([item], now) if item is not None else self

    def _without(self, items: Sequence[ConversationItem], now: float) -> StoredConversation:
        names = {item.id for item in items}
        left = tuple(item for item in self.items if item.id not in names)
        return self.changed(now, items=left, items_bytes=self.items_bytes - sum(item.size for item in items))

    def has_had(self, name: str) -> bool:
        """Whether the items of a response were added, or never will be."""
        return self._memory_of(name) is not None or any(_is_of(item, name) for item in self.items)

    def digest_of(self, name: str) -> bytes:
        """The digest of the body of a request that has added its items, or never will; b"": not known."""
        return (self._memory_of(name) or b"")[_ID_DIGITS:]

    def _memory_of(self, name: str) -> bytes | None:
        return next((one for one in self.added if one.startswith(_key_of(name))), None)

    def _remembering(self, name: str, digest: bytes) -> StoredConversation:
        mine = _key_of(name)
        digest = digest or self.digest_of(name)
        others = tuple(one for one in self.added if not one.startswith(mine))
        return msgspec.structs.replace(self, added=(*others, mine + digest)[-MAX_ADDED:])

    def find(self, item_id: str) -> ConversationItem | None:
        """An item; None: there is none of this id."""
        return next((item for item in self.items if item.id == item_id), None)

    def messages(self, before: str) -> list[dict[str, Any]]:
        """The messages for the request `before`: a repetition of one that was answered has the same ones again."""
        end = next((index for index, item in enumerate(self.items) if _is_of(item, before)), len(self.items))
        return joined(item.message for item in self.items[:end])

    def page_body(self, page: Page) -> bytes:
        """The body with a page of the items. Raises `InvalidRequest`."""
        ordered = self.items if page.is_ascending else self.items[::-1]
        first = 0
        if page.after:
            first = next((index for index, item in enumerate(ordered, 1) if item.id == page.after), 0)
            if not first:
                raise unknown_after(page.after)
        shown = ordered[first : first + page.limit]
        return list_body([(item.id, item.item) for item in shown], has_more=len(ordered) > first + page.limit)


def _key_of(name: str) -> bytes:
    return digits_of(name).encode()


def _is_of(item: ConversationItem, name: str) -> bool:
    return digits_of(name) in item.id
