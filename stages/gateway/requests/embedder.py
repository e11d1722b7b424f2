"""Vectors of prompts from the scheduler: submitted a few at a time, and again after the death of any stage.

A vector depends on the model and the prompt alone, so nothing but the prompt is stored: what is lost is computed again.
A request has at most `WINDOW` prompts at the scheduler; the others wait here, and count for no queue.  When the client
leaves, or one prompt fails, the rest is cancelled.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

import msgspec

from pipeline.errors import CODES, StarlingError
from pipeline.protocol.messages import Cancel, Frame, Pooled, Rejected, Sampling, SequenceTokens, Submit

WINDOW = 16  # prompts of a request at the scheduler: two steps of pooled entries
MIN_RETRY_S = 0.1


class EmbeddingCall(msgspec.Struct, frozen=True):
    """What all prompts of a request have in common."""

    model: str
    version: str
    tenant: str
    priority: int
    pooling: str  # one of POOLINGS
    deadline: float  # s, by the clock of the embedder


class _Prompt:
    """A prompt at the scheduler."""

    __slots__ = ("call", "done", "id", "is_submitted", "may_retry", "not_before", "tokens")

    def __init__(self, name: str, call: EmbeddingCall, tokens: bytes, may_retry: bool) -> None:
        self.id = name
        self.call = call
        self.tokens = tokens  # i32 little-endian
        self.may_retry = may_retry  # a full queue does not refuse the request any more
        self.is_submitted = False
        self.not_before = 0.0  # s: earliest time of the next submission
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()


class Embedder:
    """One per gateway. `send` returns False when the scheduler is down or its queue is full; `clock` is monotonic."""

    def __init__(self, send: Callable[[Frame], bool], clock: Callable[[], float], window: int = WINDOW) -> None:
        self._send = send
        self._clock = clock
        self._window = window
        self._prompts: dict[str, _Prompt] = {}

    async def pool(self, call: EmbeddingCall, prompts: Sequence[bytes], name: str = "") -> list[bytes]:
        """Return the vector (f32 bytes) of each prompt (i32 token ids). Equal prompts are computed once.

        `name`: of the request, for its timeline and for log lines.
        Raises `StarlingError`: a refusal of the scheduler, a failed computation, or a TIMEOUT at the deadline.
        """
        name = name or f"emb-{secrets.token_hex(12)}"
        vectors: dict[bytes, bytes] = {}
        waiting = list(dict.fromkeys(prompts))[::-1]
        running: dict[asyncio.Future[bytes], _Prompt] = {}
        n_submitted = 0
        try:
            async with asyncio.timeout(call.deadline - self._clock()):
                while waiting or running:
                    while waiting and len(running) < self._window:
                        prompt = _Prompt(f"{name}/{n_submitted}", call, waiting.pop(), n_submitted > 0)
                        n_submitted += 1
                        running[prompt.done] = prompt
                        self._prompts[prompt.id] = prompt
                        self._submit(prompt)
                    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for future in done:
                        prompt = running.pop(future)
                        vectors[prompt.tokens] = future.result()
        except TimeoutError:
            raise StarlingError(
                "TIMEOUT",
                f"{len(vectors)} of {len(set(prompts))} inputs were embedded in the time that a request may take "
                f"(server.request_timeout_ms); send fewer, or try again when it is less busy",
            ) from None
        finally:
            for prompt in running.values():
                self._drop(prompt)
        return [vectors[prompt] for prompt in prompts]

    def _drop(self, prompt: _Prompt) -> None:
        """The vector is not wanted any more."""
        if self._prompts.pop(prompt.id, None) is not None and prompt.is_submitted:
            self._send(Cancel(prompt.id))
        if not prompt.done.cancel() and not prompt.done.cancelled():
            prompt.done.exception()  # retrieved: another prompt has failed before

    def _submit(self, prompt: _Prompt) -> None:
        call = prompt.call
        prompt.is_submitted = self._send(
            Submit(
                sequence=prompt.id,
                request=prompt.id.partition("/")[0],
                model=call.version,
                tenant=call.tenant,
                prompt=prompt.tokens,
                max_tokens=1,
                sampling=Sampling(),
                deadline_ms=max(1, round((call.deadline - self._clock()) * 1000)),
                priority=call.priority,
                speculate=-1,
                pooling=call.pooling,
            )
        )

    # ---------------------------------------------------------------- from the scheduler

    def on_pooled(self, frame: Pooled) -> None:
        """The vector of a prompt; a late one is ignored."""
        prompt = self._prompts.pop(frame.sequence, None)
        if prompt is not None and not prompt.done.done():
            prompt.done.set_result(frame.vector)

    def on_end(self, part: SequenceTokens) -> bool:
        """A sequence has ended without a vector. False: it is none of this class."""
        prompt = self._prompts.get(part.sequence)
        if prompt is None:
            return False
        if part.finish != "cancelled":  # of an earlier submission, which this one has replaced
            code = "TIMEOUT" if part.finish == "timeout" else part.error or "INTERNAL"
            self._fail(prompt, StarlingError(code, part.message or "the scheduler ended this request without a reason"))
        return True

    def on_rejected(self, frame: Rejected) -> bool:
        """A prompt was not admitted: a new request fails, one that has begun tries again. False: not of this class."""
        prompt = self._prompts.get(frame.sequence)
        if prompt is None:
            return False
        prompt.is_submitted = False
        known = CODES.get(frame.code)
        if known is not None and known.retry and prompt.may_retry:
            prompt.not_before = self._clock() + max(MIN_RETRY_S, frame.retry_after_s)
        else:
            param = "input" if frame.param == "prompt" else frame.param
            retry_s = frame.retry_after_s
            self._fail(prompt, StarlingError(frame.code, frame.message, param, retry_after_s=retry_s))
        return True

    def on_scheduler_up(self) -> None:
        """A new scheduler process: submit every prompt again."""
        for prompt in self._prompts.values():
            prompt.may_retry = True
            self._submit(prompt)

    # ---------------------------------------------------------------- others

    @property
    def is_busy(self) -> bool:
        """It has prompts, which may wait for a tick to be submitted again."""
        return bool(self._prompts)

    def tick(self) -> None:
        """At each tick: submit what could not be sent, or was refused for a while."""
        now = self._clock()
        for prompt in self._prompts.values():
            if not prompt.is_submitted and now >= prompt.not_before:
                self._submit(prompt)

    def end_all(self, error: StarlingError, model: str = "", version: str = "") -> int:
        """Fail all requests, or those of a model or of a version. Returns their number."""
        ended = set()
        for prompt in list(self._prompts.values()):
            if model in ("", prompt.call.model) and version in ("", prompt.call.version):
                if prompt.is_submitted:
                    self._send(Cancel(prompt.id))
                self._fail(prompt, error)
                ended.add(prompt.id.partition("/")[0])
        return len(ended)

    def _fail(self, prompt: _Prompt, error: StarlingError) -> None:
        del self._prompts[prompt.id]
        if not prompt.done.done():
            prompt.done.set_exception(error)
