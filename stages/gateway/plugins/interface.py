"""What a plugin is. Its author imports these names from `starling.plugins`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ClassVar

import msgspec


class Refused(Exception):
    """Raised by a hook to refuse the request: its client gets `message` in a 400. `param` names the field at fault."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InferenceRequest(msgspec.Struct, kw_only=True):
    """A request before it is tokenized. `pre_inference` changes it in place.

    A request has either messages or prompts. Changes of `id`, `endpoint`, `model` and `tenant` are an error.
    """

    id: str  # req-HEX
    endpoint: str  # chat, completions, generate, messages or responses
    model: str  # as the client named it
    tenant: str  # owner of the API key; "": no keys
    # Of a chat: role, content (text), and of some messages tool_calls, tool_call_id, name, reasoning_content. A turn of
    # a session, and a request that continues a stored response, has the new messages alone.
    messages: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] = []  # of the other endpoints: texts or token ids, as the client sent them
    suffix: str | None = None  # of a fill-in-the-middle request
    documents: list[dict[str, Any]] | None = None  # that the chat template shows the model
    max_tokens: int | None = None  # None: as many as the context leaves
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None  # None: one is drawn
    stop: list[str] = []


class InferenceResponse(msgspec.Struct, kw_only=True):
    """The text of one choice so far. `post_inference` replaces `text` in place.

    While `is_final` is false more text may follow: the plugin leaves the part of its output in `text` that no later
    text can change, and holds back the rest. What it returns for a longer text must begin with that part.
    """

    request_id: str
    endpoint: str
    model: str
    tenant: str
    choice: int  # index in the answer's choices
    text: str  # as the model wrote it, from the beginning, with the marks around reasoning and tool calls
    is_final: bool
    finish_reason: str = ""  # stop or length; "": more text may follow


class Plugin:
    """Base class of plugins. The process of a plugin constructs it without arguments and calls one hook at a time.

    A hook that is not overridden costs nothing. A hook may be a coroutine function.
    """

    version: ClassVar[str] = "0"  # stored with each request: after a change of it answers are not generated again
    # False: `post_inference` is called once, with the whole text; a stream then has its text at the end.
    streams: ClassVar[bool] = True

    def initialize(self, options: dict[str, Any]) -> Awaitable[None] | None:
        """Take the options of the configuration, before any other call. An exception makes the plugin unavailable."""
        return None

    def pre_inference(self, request: InferenceRequest) -> Awaitable[None] | None:
        """Change or refuse a request, in place: once, before it is journaled."""
        return None

    def post_inference(self, response: InferenceResponse) -> Awaitable[None] | None:
        """Replace `response.text`. This must depend on the response and on the options alone.

        It is called again with the same text after a restart, and when a client reads an answer again.
        """
        return None
