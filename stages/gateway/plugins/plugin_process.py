"""The process of one plugin: loads it and makes its calls, one after the other.

`frames.py` defines what goes through stdin and stdout. What the plugin itself prints goes to stderr, a pipe to
the gateway's log. The process ends with the gateway, or when stdin is closed.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import pkgutil
import resource
import signal
import sys
import traceback
from typing import Any, BinaryIO

import msgspec

from pipeline.runtime import process
from stages.gateway.plugins.frames import (
    ERROR,
    LENGTH,
    REFUSED,
    WRONG,
    Drop,
    Failed,
    Post,
    PostDone,
    Pre,
    PreDone,
    Ready,
    Reply,
    Start,
    decode_incoming,
    frame,
)
from stages.gateway.plugins.interface import InferenceRequest, InferenceResponse, Plugin, Refused

_FIXED = ("id", "endpoint", "model", "tenant")  # fields of a request that a plugin does not change


class WrongResult(Exception):
    """The result of a hook cannot be used."""


class _Text:
    """A sequence: its text so far, and what the plugin made of it."""

    def __init__(self, about: tuple[str, str, str, str, int, str]) -> None:
        self.request_id, self.endpoint, self.model, self.tenant, self.choice, self.released = about
        self.text = ""


class Calls:
    """Makes the calls of one plugin."""

    def __init__(self, plugin: Plugin, loop: asyncio.AbstractEventLoop) -> None:
        self._plugin = plugin
        self._loop = loop
        self._texts: dict[int, _Text] = {}

    def ready(self) -> Ready:
        """Describe the plugin."""
        kind = type(self._plugin)
        has_pre = kind.pre_inference is not Plugin.pre_inference
        has_post = kind.post_inference is not Plugin.post_inference
        return Ready(str(kind.version), has_pre, has_post, bool(kind.streams))

    def run(self, result: Any) -> None:
        """Finish a hook that is a coroutine."""
        if inspect.isawaitable(result):
            self._loop.run_until_complete(_awaited(result))

    def pre(self, call: Pre) -> PreDone:
        """Call `pre_inference`."""
        request = call.request
        fixed = [getattr(request, name) for name in _FIXED]
        self.run(self._plugin.pre_inference(request))
        if [getattr(request, name) for name in _FIXED] != fixed:
            raise WrongResult(f"it changed one of {', '.join(_FIXED)}")
        try:
            checked = msgspec.convert(msgspec.to_builtins(request), InferenceRequest)
        except (msgspec.ValidationError, TypeError) as error:
            raise WrongResult(f"its result is not of the right type: {error}") from None
        return PreDone(checked)

    def post(self, call: Post) -> PostDone:
        """Call `post_inference`."""
        if call.about is not None:
            self._texts[call.key] = _Text(call.about)
        state = self._texts[call.key]
        state.text += call.text
        if call.is_final:
            del self._texts[call.key]
        response = InferenceResponse(
            request_id=state.request_id,
            endpoint=state.endpoint,
            model=state.model,
            tenant=state.tenant,
            choice=state.choice,
            text=state.text,
            is_final=call.is_final,
            finish_reason=call.finish_reason,
        )
        self.run(self._plugin.post_inference(response))
        text = response.text
        if not isinstance(text, str):
            raise WrongResult(f"response.text is a {type(text).__name__}, not a text")
        if not text.startswith(state.released):
            raise WrongResult("the text that it returned does not begin with what it returned before")
        new, state.released = text[len(state.released) :], text
        return PostDone(new)

    def drop(self, key: int) -> None:
        """Forget a sequence."""
        self._texts.pop(key, None)


async def _awaited(result: Any) -> None:
    await result


def load(start: Start) -> Plugin:
    """Import and construct the plugin. Raises anything."""
    kind: Any = pkgutil.resolve_name(start.target)
    if not (isinstance(kind, type) and issubclass(kind, Plugin)):
        raise WrongResult(f"{start.target} is not a subclass of starling.plugins.Plugin")
    plugin: Plugin = kind()
    return plugin


def failure(error: BaseException) -> Failed:
    """Return the reply for an exception. Its text is not repeated: it may hold parts of a request."""
    if isinstance(error, Refused):
        return Failed(REFUSED, str(error.message)[:2000], str(error.param)[:200])
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f"{type(error).__name__} at {at.filename}:{at.lineno}" for at in last)
    if isinstance(error, WrongResult):
        return Failed(WRONG, str(error), place=place)
    return Failed(ERROR, f"it raised {type(error).__name__}", place=place)


def _call(calls: Calls, message: object) -> bytes | None:
    """Return the reply to a frame; None: it has none."""
    reply: Reply
    try:
        match message:
            case Pre():
                reply = calls.pre(message)
            case Post():
                reply = calls.post(message)
            case Drop():
                calls.drop(message.key)
                return None
            case _:
                raise WrongResult(f"unexpected frame {type(message).__name__}")
        return frame(reply)
    except BaseException as error:  # whatever the plugin raises, SystemExit included
        return frame(failure(error))


def serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Load the plugin that the first frame names, then answer calls until `incoming` is closed."""
    calls: Calls | None = None
    while len(head := incoming.read(LENGTH.size)) == LENGTH.size:
        message = decode_incoming(incoming.read(*LENGTH.unpack(head)))
        if calls is None:
            assert isinstance(message, Start)
            resource.setrlimit(resource.RLIMIT_DATA, (message.memory_bytes, message.memory_bytes))
            try:
                plugin = load(message)
                calls = Calls(plugin, asyncio.new_event_loop())
                calls.run(plugin.initialize(message.options))
                reply: bytes | None = frame(calls.ready())
            except BaseException as error:
                outgoing.write(frame(failure(error)))
                outgoing.flush()
                return
        else:
            reply = _call(calls, message)
        if reply is not None:
            outgoing.write(reply)
            outgoing.flush()


def main() -> None:
    """Serve the gateway, which started this process with its own pid as the argument."""
    process.die_with_parent(int(sys.argv[1]))
    sys.path.append("")  # the working directory comes last: none of its modules replaces an installed one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the gateway drains first, and closes stdin
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what a plugin prints becomes lines of the gateway's log
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    serve(incoming, outgoing)


if __name__ == "__main__":
    main()
