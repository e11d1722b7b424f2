"""A client that sends expensive bodies to a server, in a process of its own: `python -m ... PORT COUNT CONNECTIONS`.

Prints the number of responses by status as JSON when all bodies are answered.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections import Counter

KEY = "sk-hostile-hostile-hostile"


def bodies() -> list[tuple[bytes, str]]:
    """Return bodies with the Content-Encoding of each."""
    return [
        (b'{"prompt": [' + b"1," * 400_000 + b"1]}", ""),
        (b'{"prompt": [' + b"1," * 3_900_000 + b"1]}", ""),
        (b'{"' + b"n" * 7_000_000 + b'": 1}', ""),
        (b'{"a": [' + b"[]," * 2_500_000 + b"1]}", ""),
        (b"[" * 1_000_000, ""),
        (gzip.compress(b'{"prompt": [' + b"1," * 3_900_000 + b"1]}"), "gzip"),
        (json.dumps({"prompt": "x", "stop": {str(i): i for i in range(20_000)}}).encode(), ""),
        (b'{"prompt": [' + b"1," * 1_900 + b'1], "n": 99}', ""),
        (b'{"prompt": "' + b"\\u00e9" * 20_000 + b'", "n": 99}', ""),
    ]


async def send(port: int, body: bytes, coding: str) -> str:
    """Send one body on a connection of its own; return the status."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        head += f"Content-Encoding: {coding}\r\n" if coding else ""
        writer.write(head.encode() + b"\r\n")
        writer.write(body)
        status = (await reader.readline()).split()[1].decode()
        writer.close()
    except (OSError, IndexError) as error:
        return type(error).__name__
    return status


async def attack(port: int, count: int, connections: int) -> dict[str, int]:
    """Send `count` bodies, `connections` at a time. Returns the number of responses by status."""
    kinds = bodies()
    statuses: Counter[str] = Counter()
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            statuses[await send(port, *kinds[number % len(kinds)])] += 1

    await asyncio.gather(*(work() for _ in range(connections)))
    return dict(statuses)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(attack(*map(int, sys.argv[1:4])))))
