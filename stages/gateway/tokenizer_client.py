"""Questions to the tokenizer: what a text's tokens are, what tokens read like, what a model is.

They change nothing there, so they are simply asked again when it comes back.  Bounded in number and in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pipeline.errors import ModelUnavailable, Overloaded, StarlingError
from pipeline.protocol import messages as m

TIMEOUT_S = 30.0  # for one answer
MAX_QUESTIONS = 2048  # unanswered
RETRY_AFTER_S = 5.0  # what a 503 says


class TokenizerClient:
    """One per process. `send` gives a frame to the tokenizer, False: not now."""

    def __init__(self, send: Callable[[m.Frame], bool]) -> None:
        self._send = send
        self._open: dict[str, tuple[m.Frame, asyncio.Future[Any]]] = {}
        self._unsent: set[str] = set()  # of them: to be sent as soon as that is possible
        self._next = 1

    # ---------------------------------------------------------------- their way

    async def ask(self, make: Callable[[str], m.Frame], timeout_s: float = TIMEOUT_S) -> Any:
        """The answer; `make` gets the id. Raises what the tokenizer answers, or `ModelUnavailable`."""
        if len(self._open) >= MAX_QUESTIONS:
            raise Overloaded(f"{MAX_QUESTIONS} texts are being tokenized; try again", retry_after_s=1.0)
        key = f"q{self._next}"
        self._next += 1
        frame = make(key)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[key] = (frame, future)
        try:
            # Not sent: its queue is full, or it has just died and nobody has told yet. Later, then.
            if not self._send(frame):
                self._unsent.add(key)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise ModelUnavailable(
                f"the tokenizer has not answered within {timeout_s:.0f} s; try again",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        finally:
            self._open.pop(key, None)
            self._unsent.discard(key)

    def answer(self, key: str, answer: m.Frame | StarlingError) -> None:
        """To the question `key`, if anybody still waits for it."""
        entry = self._open.pop(key, None)
        if entry is None or entry[1].done():
            return
        if isinstance(answer, StarlingError):
            entry[1].set_exception(answer)
        else:
            entry[1].set_result(answer)

    def on_up(self) -> None:
        """A new incarnation of the tokenizer: it is asked everything that is open."""
        self._unsent = {key for key, (frame, _) in list(self._open.items()) if not self._send(frame)}

    def tick(self) -> None:
        """Send what could not be sent before."""
        self._unsent.intersection_update(self._open)
        self._unsent = {key for key in self._unsent if not self._send(self._open[key][0])}

    # ---------------------------------------------------------------- what is asked

    def describe(
        self, instance: str, known: tuple[str, ...], on_done: Callable[[asyncio.Future[m.Described]], None]
    ) -> None:
        """Ask for the model's description, once at a time and without a limit: it may still be loading.

        known: tokenizers whose pieces are here.
        """
        key = f"describe/{instance}"
        if key in self._open:
            return
        future: asyncio.Future[m.Described] = asyncio.get_running_loop().create_future()
        future.add_done_callback(on_done)
        frame = m.Describe(key, instance, known)
        self._open[key] = (frame, future)
        self._send(frame)

    def forget(self, instance: str) -> None:
        """That version is gone."""
        self._open.pop(f"describe/{instance}", None)

    async def encode(
        self,
        instance: str,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool = True,
        offsets: bool = False,
        most: int = 0,
    ) -> m.Encoded:
        """Of a text of more than `most` tokens (0: any number) the answer has only their number."""
        answer: m.Encoded = await self.ask(
            lambda key: m.Encode(key, instance, text, parse_special, add_bos, offsets, most)
        )
        return answer

    async def render(self, instance: str, messages: list[dict[str, Any]], most: int = 0) -> m.Encoded:
        """`most` as of `encode`."""
        answer: m.Encoded = await self.ask(lambda key: m.Render(key, instance, messages, token_limit=most))
        return answer

    async def decode(self, instance: str, tokens: tuple[int, ...], *, skip_special: bool = False) -> str:
        """The text of whole tokens."""
        answer: m.Detokenized = await self.ask(lambda key: m.Detokenize(key, instance, tokens, skip_special))
        return answer.text
