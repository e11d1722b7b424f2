"""A blob store behind nginx, with a bound for each connection, and a link with a bound for all of them together.

nginx does not hold the bound for short requests: for pieces of 8 MiB and a `limit_rate` of 40 MB/s, 49 to 52 MB/s were
measured, and 34 to 39 MB/s by a client at nice 15 on a busy machine.  `one_connection_s` measures it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.catalog.entry import models_folder
from pipeline.runtime.process import die_with_parent
from shm.checkpoint import PIECE_BYTES
from tools.bench.fleet.forwarding import NGINX
from tools.ports import free_port

CHUNK_BYTES = 64 << 10
TIMEOUT_S = 60.0  # of one request
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

    def __init__(self, port: int, log: Path, blobs: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._blobs = blobs

    def bytes_sent(self) -> int:
        """Of weights, by finished requests."""
        rows = [line.split() for line in self._log.read_text().splitlines()]
        return sum(int(row[0]) for row in rows if len(row) == 2 and row[1].endswith(".bin"))

    def one_connection_s(self, digest: str) -> tuple[int, float]:
        """Bytes of a model's weights, and seconds for them: piece by piece over one connection, and nothing else.

        No download by one connection can be faster. Raises `RuntimeError` if the store does not answer with the pieces.
        """
        paths = sorted((self._blobs / models_folder(digest)).glob("*.bin"))
        if not paths:
            raise RuntimeError(f"the store has no weights of {digest}")
        requests = [
            (f"/{path.relative_to(self._blobs)}", at, min(PIECE_BYTES, path.stat().st_size - at))
            for path in paths
            for at in range(0, path.stat().st_size, PIECE_BYTES)
        ]
        buffer = bytearray(PIECE_BYTES)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)) as connection:
            connection.connect()
            begun = time.perf_counter()
            for path, at, nbytes in requests:
                connection.request("GET", path, headers={"Range": f"bytes={at}-{at + nbytes - 1}"})
                response = connection.getresponse()
                if response.status != 206 or response.length != nbytes:
                    raise RuntimeError(f"{path} from {at} on: {response.status} with {response.length} bytes")
                view = memoryview(buffer)[:nbytes]
                while view:
                    if not (n_read := response.readinto(view)):
                        raise RuntimeError(f"{path} from {at} on ends {len(view)} bytes early")
                    view = view[n_read:]
            return sum(nbytes for _, _, nbytes in requests), time.perf_counter() - begun


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
        yield LimitedStore(port, home / "sent.log", blobs)
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
                with contextlib.suppress(OSError):
                    await one.wait_closed()

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
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(_end_tasks())
        loop.close()


async def _end_tasks() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
