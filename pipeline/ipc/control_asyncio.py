"""The control socket of a stage with an asyncio loop, and a client for such loops; control.py has the protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pipeline.errors import InternalError, StarlingError
from pipeline.ipc.control import IDLE_S, MAX_CLIENTS, MAX_LINE, failed, is_ours, parse, socket_path
from pipeline.runtime import run_dir as rundir

log = logging.getLogger("starling.control")

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def ask(run_dir: Path, stage: str, request: dict[str, Any], max_bytes: int) -> bytes:
    """Send a request; the line of the answer, of at most `max_bytes`. The caller bounds the time.

    Raises `OSError` if there is no socket, and `ValueError` for a longer answer.
    """
    reader, writer = await asyncio.open_unix_connection(str(socket_path(run_dir, stage)), limit=max_bytes)
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        return await reader.readline()
    finally:
        writer.close()


class ControlServer:
    """A stage's control socket in the running loop. `handler(request)` returns the answer's fields."""

    def __init__(self, run_dir: Path, stage: str, handler: Handler) -> None:
        self.path = socket_path(run_dir, stage)
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind. The stage holds its lock, so a file at the path is from a predecessor."""
        rundir.clear_socket(f"ipc://{self.path}")
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=MAX_LINE)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        """Idempotent; connections that wait for an answer are closed."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for client in list(self._clients):
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            if len(self._clients) <= MAX_CLIENTS and is_ours(writer.get_extra_info("socket").fileno()):
                await self._serve_lines(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            pass  # disconnected, idle for too long, line too long, or closing
        finally:
            self._clients.discard(task)
            writer.close()

    async def _serve_lines(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                line = await reader.readline()
            if not line.endswith(b"\n"):
                return
            writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
            await writer.drain()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return {"ok": True, **await self._handler(parse(line))}
        except StarlingError as error:
            return failed(error)
        except Exception:
            log.exception("control request failed")
            return failed(InternalError("the stage failed to handle the request; see its log"))
