"""Which blob is a conversation's present value: records in the coordination store that all orchestrators change.

    responses/conversations/FOLDER/ID   the end of the blob's name, and its bytes

A blob is written once, under a name of its own, and then becomes the present value by a swap of the record: of two
orchestrators that change a conversation at once, one finds that the other was first.  A blob that no record names is
what a change has not ended with.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

import msgspec

from pipeline.coordination.interface import CoordinationStore
from pipeline.errors import StorageUnavailable
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.responses.use import PREFIX, answer

HEADS = f"{PREFIX}conversations/"
_NAME = re.compile(r"conv_[0-9a-f]{48}")


class _Value(msgspec.Struct, array_like=True, frozen=True):
    """The value of a record."""

    end: str
    nbytes: int


class Head(NamedTuple):
    """The present value of a conversation."""

    key: str  # of its blob
    nbytes: int
    revision: int  # of the record


def is_conversation(name: str) -> bool:
    """Whether a client's text can be the id of a conversation."""
    return _NAME.fullmatch(name) is not None


def new_blob(folder: str, name: str) -> str:
    """A name for the next blob of a conversation."""
    return f"{folder}/{name}.{secrets.token_hex(8)}"


def conversation_of(key: str) -> str:
    """The conversation that a blob is, or was, a value of; "": it is a response."""
    name = key.rpartition("/")[2].partition(".")[0]
    return name if is_conversation(name) else ""


class Heads:
    """One per orchestrator. All methods raise `StorageUnavailable`."""

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store

    async def find(self, folder: str, name: str) -> Head | None:
        """The present value; None: there is no such conversation."""
        item = await answer(self._store.get(f"{HEADS}{folder}/{name}"))
        return _head(folder, name, item.value, item.revision) if item is not None else None

    async def all(self, folder: str) -> dict[str, Head]:
        """Those of a tenant, by conversation."""
        items, _ = await answer(self._store.scan(f"{HEADS}{folder}/"))
        names = [(item, item.key.rpartition("/")[2]) for item in items]
        return {name: _head(folder, name, item.value, item.revision) for item, name in names}

    async def swap(self, folder: str, name: str, before: Head | None, key: str, nbytes: int) -> bool:
        """Let a blob be the next value. False: the present one is not `before`. Whether an error has is not known."""
        value = msgspec.json.encode(_Value(key.rpartition(".")[2], nbytes))
        revision = before.revision if before is not None else 0
        return await answer(self._store.swap(f"{HEADS}{folder}/{name}", revision, value)) is not None

    async def remove(self, folder: str, name: str, before: Head) -> bool:
        """End the conversation. False: its present value is not `before`."""
        return await answer(self._store.swap(f"{HEADS}{folder}/{name}", before.revision, None)) is not None

    async def fence(self, folder: str, name: str) -> Head | None:
        """The present value, after which no change that began before can end. None: there is none, or it changed."""
        head = await self.find(folder, name)
        if head is None or not await self.swap(folder, name, head, head.key, head.nbytes):
            return None
        return await self.find(folder, name)


def _head(folder: str, name: str, value: bytes, revision: int) -> Head:
    try:
        found = msgspec.json.decode(value, type=_Value)
    except DECODE_ERRORS as error:
        raise StorageUnavailable(f"the record of conversation {name} cannot be read: {error}") from None
    return Head(f"{folder}/{name}.{found.end}", found.nbytes, revision)
