"""Parses request bodies: small ones in the event loop, one in a turn; large ones in a few processes.

What is small is decided by a bound of the work, not by the size alone: a text of 100 KB is decoded in a fraction of a
millisecond, as many numbers take 20 ms.  Waiting bodies are taken from the tenants in turn.  A process that does not
answer within `TIME_LIMIT_S` is killed, and its body refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
from array import array
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from pipeline.api.json_body import count_separators
from pipeline.api.requests.embeddings import EmbeddingRequest
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.api.requests.tokenize import DetokenizeRequest
from pipeline.errors import InternalError, StarlingError
from pipeline.observe.helper_output import HelperOutput
from pipeline.tenant_turns import TenantTurns
from stages.gateway.endpoints.body_readers import Body, read_request_body
from stages.gateway.http.parser_process import HEAD, LENGTH

log = logging.getLogger("starling.gateway.http")

PROCESSES = 2
INLINE_BYTES = 128 << 10  # parsed in the event loop, if they have no coding and
INLINE_SEPARATORS = 2_000  # at most this many brackets and commas: together under 1 ms
ATTEMPTS = 2  # a process that is killed fails no body; a body that ends two processes is refused
TIME_LIMIT_S = 20.0  # of one body; a million values take 0.5 s of an idle core
IDS_AT_ONCE = 16_384  # turned into Python numbers before other streams get the event loop: 0.2 ms
BYTES_AT_ONCE = 128 << 10  # of a body, sent to a process
STREAM_BUFFER = 1 << 20  # of an answer, in the gateway


class ParserPool:
    """One per gateway. Its processes are started when they are needed, and end with `close` or with the gateway."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting: TenantTurns[_Job] = TenantTurns()
        self._parsers: set[asyncio.Task[None]] = set()
        self._n_idle = 0
        self._arrived = asyncio.Condition()
        self._is_closed = False

    async def read(self, body: Body, tenant: str) -> Any:
        """Return the result of the body's reader. Raises `StarlingError`."""
        data = body.data
        if body.coding or len(data) > INLINE_BYTES or count_separators(data) > INLINE_SEPARATORS:
            return await self._read_elsewhere(body, tenant)
        async with self._turn:
            result = read_request_body(body)
            await asyncio.sleep(0)  # the next body is parsed in the event loop's next turn
        return result

    async def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        for parser in self._parsers:
            parser.cancel()
        await asyncio.gather(*self._parsers, return_exceptions=True)

    async def _read_elsewhere(self, body: Body, tenant: str) -> Any:
        job = _Job(body, asyncio.get_running_loop().create_future())
        self._waiting.add(tenant, job)
        # An idle parser that was notified of an earlier body counts as idle until it runs.
        is_late = len(self._waiting) > self._n_idle
        if is_late and len(self._parsers) < PROCESSES and not self._is_closed:
            parser = asyncio.get_running_loop().create_task(self._parse())
            self._parsers.add(parser)
            parser.add_done_callback(self._parsers.discard)
        try:
            async with self._arrived:
                self._arrived.notify()
            answer = await job.result
        finally:
            if job in self._waiting.of(tenant):  # its client has left: nothing counts the bytes of the body any more
                self._waiting.remove(tenant, job)
        return await unpack_ids(answer)

    def _next(self) -> _Job | None:
        """Take the next body of the tenant whose turn it is; None if none waits."""
        while self._waiting:
            job = self._waiting.take()
            if not job.result.done():  # otherwise its client has just left
                return job
        return None

    async def _parse(self) -> None:
        """Parse bodies in a process, one after the other; start it again after a failure."""
        process: _Process | None = None
        result: asyncio.Future[Any] | None = None
        try:
            while True:
                self._n_idle += 1
                try:
                    async with self._arrived:
                        while (job := self._next()) is None:
                            await self._arrived.wait()
                finally:
                    self._n_idle -= 1
                body, result = job.body, job.result
                del job
                is_valid, answer = False, _failure(None)
                for _ in range(ATTEMPTS):
                    try:
                        if process is None or process.child.returncode is not None:
                            await _end(process)
                            process = await _start()
                        async with asyncio.timeout(TIME_LIMIT_S):
                            is_valid, answer = await _exchange(process.child, body)
                        if not is_valid:
                            answer = _refusal(*answer)
                        break
                    except Exception as error:  # whatever it is: the body gets an answer, and the next one a process
                        log.error("a parser process failed", extra={"reason": str(error) or type(error).__name__})
                        await _end(process)
                        process = None
                        is_valid, answer = False, _failure(error)
                        if isinstance(error, TimeoutError):
                            break
                del body
                if not result.done():
                    if is_valid:
                        result.set_result(answer)
                    else:
                        result.set_exception(answer)
                del answer
                result = None
        finally:
            if result is not None and not result.done():
                result.set_exception(_failure(None))
            await _end(process)


async def unpack_ids(result: Any) -> Any:
    """Return `result` with token ids as tuples again; gives up the event loop in between."""
    if isinstance(result, GenerationRequest):
        prompts = [p if isinstance(p, str) else await _to_tuple(p) for p in result.prompts]
        return msgspec.structs.replace(result, prompts=prompts)
    if isinstance(result, EmbeddingRequest):
        inputs = [p if isinstance(p, str) else await _to_tuple(p) for p in result.inputs]
        return msgspec.structs.replace(result, inputs=inputs)
    if isinstance(result, DetokenizeRequest):
        return msgspec.structs.replace(result, tokens=await _to_tuple(result.tokens))
    return result


async def _to_tuple(ids: Any) -> tuple[int, ...]:
    assert isinstance(ids, array)
    numbers: list[int] = []
    for begin in range(0, len(ids), IDS_AT_ONCE):
        numbers.extend(ids[begin : begin + IDS_AT_ONCE])
        await asyncio.sleep(0)
    return tuple(numbers)


class _Job:
    """A body, and what becomes of it. Two are equal only if they are one."""

    __slots__ = ("body", "result")

    def __init__(self, body: Body, result: asyncio.Future[Any]) -> None:
        self.body = body
        self.result = result


class _Process(NamedTuple):
    child: asyncio.subprocess.Process
    output: HelperOutput


async def _start() -> _Process:
    output = HelperOutput(log, {"helper": "parser"})
    try:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "stages.gateway.http.parser_process",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output.write_fd,
            limit=STREAM_BUFFER,
        )
    except BaseException:
        output.close()
        raise
    output.started(child.pid)
    output.watch(asyncio.get_running_loop())
    return _Process(child, output)


async def _exchange(process: asyncio.subprocess.Process, body: Body) -> tuple[bool, Any]:
    """Send a body and return the answer.

    Raises `OSError` or `EOFError` if the process ends meanwhile, and `RuntimeError` (uvloop's, for a closed pipe) if
    it had ended before.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    fields, data = pickle.dumps(tuple(body[1:]), pickle.HIGHEST_PROTOCOL), memoryview(body.data)
    process.stdin.write(HEAD.pack(len(fields), len(data)) + fields)
    for begin in range(0, len(data), BYTES_AT_ONCE):
        process.stdin.write(bytes(data[begin : begin + BYTES_AT_ONCE]))
        await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    is_valid, answer = pickle.loads(await process.stdout.readexactly(length))
    return is_valid, answer


async def _end(process: _Process | None) -> None:
    """End a process and the lines of its output. Idempotent."""
    if process is None:
        return
    try:
        with suppress(ProcessLookupError):
            process.child.kill()
        await process.child.wait()
    finally:
        process.output.close()


def _refusal(
    code: str, message: str, param: str, status: int, names: tuple[str, str] = ("", ""), *_: Any
) -> StarlingError:
    """Return the error of a refused body. A process of another release may give more or fewer fields."""
    refusal = StarlingError(code, message, param, status=status)
    refusal.names = (names[0], names[1])
    return refusal


def _failure(error: BaseException | None) -> StarlingError:
    """Return the error for a body that was not parsed."""
    if isinstance(error, TimeoutError):
        message = f"the body was not parsed within {TIME_LIMIT_S:g} s; send less, or try again"
        return StarlingError("TIMEOUT", message, status=503)
    return InternalError("the body could not be parsed; the server's log has the details")
