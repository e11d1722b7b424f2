"""The client of the tokenizer stage: encodes texts, renders chats, decodes tokens, and gets descriptions of models.

Requests change no state in the tokenizer, so they are sent again to a new tokenizer process.  They are bounded in
number and time; one whose caller does not wait any more is cancelled there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from pipeline.api.requests.generation_request import TemplateArguments
from pipeline.errors import ModelUnavailable, Overloaded, StarlingError
from pipeline.protocol import messages as m

TIMEOUT_S = 30.0  # for one reply
MAX_PENDING = 3072  # requests without a reply
MAX_TENANT_PENDING = 2048  # of one tenant: 32 requests for embeddings, which send 64 texts at once
RETRY_AFTER_S = 5.0  # of a 503


class TextOwner(NamedTuple):
    """Whose text it is, for log lines and for the bounds of a tenant; "": of none in particular."""

    request_id: str = ""
    tenant: str = ""
    session_id: str = ""


NO_OWNER = TextOwner()


class TokenizerClient:
    """One per process. `send` sends a frame to the tokenizer, and returns False if that is not possible now."""

    def __init__(self, send: Callable[[m.Frame], bool]) -> None:
        self._send = send
        self._pending: dict[str, tuple[m.Frame, asyncio.Future[Any]]] = {}
        self._pending_of: Counter[str] = Counter()  # requests without a reply, by tenant
        self._unsent: set[str] = set()  # ids of pending requests that are to be sent when that is possible
        self._next = 1

    # ---------------------------------------------------------------- transport

    async def request(self, make: Callable[[str], m.Frame], tenant: str = "", timeout_s: float = TIMEOUT_S) -> Any:
        """Return the reply to the frame that `make` builds for an id. Raises its error, or `ModelUnavailable`.

        `tenant`: whose text it is; "": of none, then the bound on a tenant's texts does not hold.
        """
        if len(self._pending) >= MAX_PENDING:
            raise Overloaded(f"{MAX_PENDING} texts are waiting for the tokenizer; try again", retry_after_s=1.0)
        if tenant and self._pending_of[tenant] >= MAX_TENANT_PENDING:
            raise Overloaded(
                f"{MAX_TENANT_PENDING} of your texts are waiting for the tokenizer, the most of one tenant; try again",
                retry_after_s=1.0,
            )
        key = f"q{self._next}"
        self._next += 1
        frame = make(key)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[key] = (frame, future)
        self._pending_of[tenant] += 1
        try:
            # The tokenizer's queue may be full, or its process may have exited unnoticed: `tick` or `on_up` sends it.
            if not self._send(frame):
                self._unsent.add(key)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise ModelUnavailable(
                f"the tokenizer has not replied within {timeout_s:.0f} s; try again",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        finally:
            if self._pending.pop(key, None) is not None and key not in self._unsent:
                # If it cannot be sent, the tokenizer makes a reply that `on_reply` drops.
                self._send(m.CancelText(key))
            self._unsent.discard(key)
            self._pending_of[tenant] -= 1
            if not self._pending_of[tenant]:
                del self._pending_of[tenant]

    def on_reply(self, key: str, reply: m.Frame | StarlingError) -> None:
        """Complete the request `key`, if it is still pending."""
        entry = self._pending.pop(key, None)
        if entry is None or entry[1].done():
            return
        if isinstance(reply, StarlingError):
            entry[1].set_exception(reply)
        else:
            entry[1].set_result(reply)

    def on_up(self) -> None:
        """Send every pending request to a new tokenizer process."""
        self._unsent = {key for key, (frame, _) in list(self._pending.items()) if not self._send(frame)}

    @property
    def has_unsent(self) -> bool:
        """Requests wait for a tick to be sent."""
        return bool(self._unsent)

    def tick(self) -> None:
        """Send the requests that could not be sent before."""
        self._unsent.intersection_update(self._pending)
        self._unsent = {key for key in self._unsent if not self._send(self._pending[key][0])}

    # ---------------------------------------------------------------- requests

    def describe(
        self, version_id: str, known: tuple[str, ...], on_done: Callable[[asyncio.Future[m.Described]], None]
    ) -> None:
        """Request the description of a version, unless that is pending. Without a timeout: it may still be loading.

        known: digests of the tokenizers whose vocabulary is not needed in the reply.
        """
        key = f"describe/{version_id}"
        if key in self._pending:
            return
        future: asyncio.Future[m.Described] = asyncio.get_running_loop().create_future()
        future.add_done_callback(on_done)
        frame = m.Describe(key, version_id, known)
        self._pending[key] = (frame, future)
        self._send(frame)

    def forget(self, version_id: str) -> None:
        """Drop the pending description of a version that is no longer loaded."""
        self._pending.pop(f"describe/{version_id}", None)

    async def encode(
        self,
        version_id: str,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool = True,
        offsets: bool = False,
        token_limit: int = 0,
        owner: TextOwner = NO_OWNER,
        suffix: str = "",
        field: str = "prompt",
    ) -> m.Encoded:
        """Return the token ids of a text; for more than `token_limit` tokens (0: no limit) only their number.

        suffix: return the ids of the prompt for what stands between the two texts.
        field: of the request, which has the text, or `FIELD[INDEX]`, for error messages.
        """
        reply = self.request(
            lambda key: m.Encode(
                key,
                version_id,
                text,
                parse_special,
                add_bos,
                offsets,
                token_limit,
                owner.request_id,
                suffix,
                owner.tenant,
                owner.session_id,
            ),
            owner.tenant,
        )
        encoded: m.Encoded = await _naming(reply, "prompt", field)
        return encoded

    async def render(
        self,
        version_id: str,
        messages: list[dict[str, Any]],
        arguments: TemplateArguments,
        token_limit: int = 0,
        now: str = "",
        owner: TextOwner = NO_OWNER,
        field: str = "messages",
    ) -> m.Encoded:
        """Return the token ids of a chat, rendered by the model's template; `token_limit` as for `encode`.

        arguments: what the template gets besides the messages.
        now: the time that the template shows (ISO 8601), so that repeating the call gives the same ids.
        field: of the request, which has the messages, for error messages.
        """
        reply = self.request(
            lambda key: m.Render(
                key,
                version_id,
                messages,
                arguments.add_generation_prompt,
                arguments.tools,
                arguments.variables,
                token_limit,
                now,
                owner.request_id,
                arguments.documents,
                arguments.continue_final_message,
                owner.tenant,
                owner.session_id,
            ),
            owner.tenant,
        )
        rendered: m.Encoded = await _naming(reply, "messages", field)
        return rendered

    async def decode(
        self, version_id: str, tokens: tuple[int, ...], *, skip_special: bool = False, owner: TextOwner = NO_OWNER
    ) -> str:
        """Return the text of tokens."""
        reply: m.Detokenized = await self.request(
            lambda key: m.Detokenize(key, version_id, tokens, skip_special, *owner), owner.tenant
        )
        return reply.text


async def _naming(reply: Awaitable[Any], name: str, field: str) -> Any:
    """Return the reply. In an error about the field that the tokenizer calls `name` it has the request's name."""
    try:
        return await reply
    except StarlingError as error:
        if field == name or error.param != name:
            raise
        message = error.message
        if message.startswith(f"{name} "):
            message = f"{field}{message.removeprefix(name)}"
        raise StarlingError(error.code, message, field.partition("[")[0], retry_after_s=error.retry_after_s) from None
