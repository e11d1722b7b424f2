"""What a TCP connection has carried."""

from __future__ import annotations

import asyncio

from pipeline.ipc.tcp_transport import Bytes, tcp_bytes


def test_bytes_of_a_connection_are_those_of_both_directions() -> None:
    async def run() -> tuple[Bytes, Bytes]:
        done = asyncio.Event()
        found: list[Bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(1000)
            writer.write(bytes(500))
            await writer.drain()
            await reader.read()  # the client has read everything and closes
            found.append(tcp_bytes(writer.transport))
            writer.close()
            done.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(bytes(1000))
        await reader.readexactly(500)
        mine = tcp_bytes(writer.transport)
        writer.close()
        await done.wait()
        server.close()
        return mine, found[0]

    mine, theirs = asyncio.run(run())
    assert mine == Bytes(received=500, sent=1000)
    assert theirs.sent == 500
    assert 1000 <= theirs.received <= 1001  # the end of a connection counts as a byte


def test_other_transports_have_none() -> None:
    assert tcp_bytes(asyncio.Transport()) == Bytes()
