"""A blob store behind nginx, with a bound for each connection, and a link with a bound for all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.runtime.process import die_with_parent
from tools.bench.fleet.forwarding import NGINX
from tools.ports import free_port

CHUNK_BYTES = 64 << 10
BURST_S = 0.02  # of the link's rate
_CONFIG = """
daemon off; {user} worker_processes 1; pid {home}/nginx.pid; error_log /dev/null;
events {{ worker_connections 1024; }}
http {{
  log_format sent '$body_bytes_sent $uri';
  access_log {home}/sent.log sent; client_body_temp_path {home}/b; proxy_temp_path {home}/p;
  fastcgi_temp_path {home}/f; uwsgi_temp_path {home}/u; scgi_temp_path {home}/s;
  sendfile on; keepalive_requests 1000000;
  server {{ listen 127.0.0.1:{port}; root {blobs}; {limit} }}
}}
"""


class LimitedStore:
    """nginx with a folder of blobs. `url` is its address."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    def bytes_sent(self) -> int:
        """Of weights, by finished requests."""
        rows = [line.split() for line in self._log.read_text().splitlines()]
        return sum(int(row[0]) for row in rows if len(row) == 2 and row[1].endswith(".bin"))


@contextlib.contextmanager
def limited_store(home: Path, blobs: Path, mb_per_s: float = 0) -> Iterator[LimitedStore]:
    """Serve `blobs`; `mb_per_s`: of one connection, in 10^6 bytes; 0: no bound."""
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    limit = f"limit_rate {round(mb_per_s * 1e6)};" if mb_per_s else ""
    user = "user root;" if os.getuid() == 0 else ""
    config = home / "nginx.conf"
    config.write_text(_CONFIG.format(home=home, blobs=blobs, port=port, limit=limit, user=user))
    process = subprocess.Popen(
        [NGINX, "-p", str(home), "-c", str(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    try:
        while not (home / "nginx.pid").exists():
            if process.poll() is not None:
                raise RuntimeError(f"nginx has ended with {process.returncode}: nginx -t -c {config} says why")
            time.sleep(0.01)
        yield LimitedStore(port, home / "sent.log")
    finally:
        process.terminate()
        process.wait()


class _Link:
    """Relays connections to a port; what comes back is bounded for all of them together."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._port = port
        self._rate = bytes_per_s
        self._free_at = 0.0

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        tasks = [asyncio.create_task(self._copy(reader, back, False)), asyncio.create_task(self._copy(there, writer))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in (writer, back):
                one.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_bounded: bool = True) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if is_bounded:
                now = time.monotonic()
                self._free_at = max(now - BURST_S, self._free_at) + len(data) / self._rate
                if (wait := self._free_at - now) > 0:
                    await asyncio.sleep(wait)
            writer.write(data)
            await writer.drain()


@contextlib.contextmanager
def link(port: int, mb_per_s: float) -> Iterator[str]:
    """The URL of a link to `port` that carries `mb_per_s` (10^6 bytes/s) in all. It runs in a thread."""
    loop = asyncio.new_event_loop()
    relay = _Link(port, mb_per_s * 1e6).relay
    server = loop.run_until_complete(asyncio.start_server(relay, "127.0.0.1", 0, limit=CHUNK_BYTES))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
