"""Journal records of a fixed time, and the functions that write and read them, for several test modules."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.protocol.messages import Sampling
from stages.gateway.requests.journal import Journal, RequestEnd
from stages.gateway.requests.spec import RequestSpec, SequenceSpec

NOW = 1e9


def make_spec(name: str, prompt: bytes = b"1234") -> RequestSpec:
    """A request with every kind of field, and two choices."""
    sampling = Sampling(seed=2**64 - 1, logit_bias=((3, -1.5),))
    return RequestSpec(
        id=name,
        tenant="tenant",
        model="m",
        digest="ab" * 32,
        numerics=1,
        generation=GenerationRequest(endpoint="chat", model="m", stream=True, stop=("\n",), seed=2**64 - 1),
        seed=2**64 - 1,
        created=17,
        fingerprint="fp",
        deadline=NOW + 60,
        client_id=name,
        prompts=(prompt,),
        echoes=("echo",),
        sequences=(SequenceSpec(0, 0, 0, 9, sampling, (1, 2)), SequenceSpec(0, 0, 1, 9, sampling, (1, 2))),
    )


def spec_of(tenant: str, name: str) -> RequestSpec:
    """A request of 1,000 bytes."""
    return msgspec.structs.replace(make_spec(name, b"1234" * 250), tenant=tenant)


def part_of(tenant: str, total: int) -> int:
    """A tenant's part where there are several."""
    return total - total // 4


def open_journal(
    directory: Path,
    max_bytes: int = 1 << 20,
    wall: Callable[[], float] = lambda: NOW,
    part_of: Callable[[str, int], int] = lambda tenant, total: total,
    clock: Callable[[], float] = time.monotonic,
) -> Journal:
    """The journal of a gateway that starts."""
    return Journal(directory, max_bytes, wall, part_of, clock)


def recovered(directory: Path, wall: Callable[[], float] = lambda: NOW) -> dict[str, RequestEnd | None]:
    """The requests that a restarted gateway finds, and their ends."""
    reader = open_journal(directory, wall=wall)
    reader.close()
    entries = reader.take_entries()
    for spec, _ in entries:
        assert spec == make_spec(spec.id, spec.prompts[0])
    return {spec.id: end for spec, end in entries}
