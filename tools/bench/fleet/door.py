"""The TLS door of the stand-in's agent: `python -m tools.bench.fleet.door ENGINE_PORT DIR`; prints its API's port.

The door is the agent's own (stages/agent/doors.py), in a process of its own as there, with the certificate of the
stand-in in DIR.  The API behind TLS answers heartbeats alone.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop

from pipeline.config.schema import FleetTlsConfig
from pipeline.fleet.peer_tls import open_tls
from stages.agent.doors import Doors, Factory, Server
from tools.bench.fleet.stand_in import AGENT, Exchange, report

BACKLOG = 1024


def tls_files(folder: Path, name: str) -> FleetTlsConfig:
    """Where the certificate of a process is."""
    return FleetTlsConfig(
        cert=str(folder / f"{name}.pem"), key=str(folder / f"{name}.key"), ca=str(folder / "authority.pem")
    )


async def serve(engine_port: int, folder: Path) -> None:
    """Serve until the process is killed."""
    tls = open_tls(tls_files(folder, AGENT), "agent", AGENT)
    assert tls is not None
    context, loop = tls.server_context("orchestrator"), asyncio.get_running_loop()

    async def listen(factory: Factory) -> tuple[Server, str]:
        server = await loop.create_server(factory, "127.0.0.1", 0, ssl=context, backlog=BACKLOG)
        return server, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def connect(factory: Factory, engine: str) -> None:
        parts = urlsplit(engine)
        await loop.create_connection(factory, parts.hostname or "", parts.port or 0)

    doors = Doors(listen, connect)
    answer = msgspec.json.encode(await doors.report(report(f"http://127.0.0.1:{engine_port}")))
    _api, url = await listen(lambda: Exchange(lambda port: answer))
    print(urlsplit(url).port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
