"""What the orchestrators of a fleet share, for tests that run on each kind of it that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# The coordination store, and after it the place for responses where that is not a directory.
STORES = ("sqlite", "etcd", "redis s3")


def every_store(mark: pytest.MarkDecorator) -> list[Any]:
    """Values of `pair`: the first store, on which all tests run, and those of servers, with a mark.

    Without their servers (`make fleet-peers`) the tests on them are skipped.
    """
    return [STORES[0], *(pytest.param(one, marks=mark) for one in STORES[1:])]


def fleet_section(request: pytest.FixtureRequest, kind: str, home: Path) -> dict[str, Any]:
    """The section `fleet` of a configuration, but for its other keys. `home`: of the orchestrators, a new one."""
    store, _, place = kind.partition(" ")
    if store == "sqlite":
        return {}
    name = f"{home.parent.name}-{home.name}"
    address = f"{store}://127.0.0.1:{request.getfixturevalue(store).port}/{name}"
    section: dict[str, Any] = {"store": address, "orchestrator": {"responses": str(home / "responses")}}
    if place:
        bucket = request.getfixturevalue("bucket")
        section["orchestrator"]["responses"] = bucket.address(name)
        section |= {"blobs": bucket.address(f"{name}-models"), "blobs_endpoint": bucket.endpoint}
        section["blobs_region"] = "us-east-1"
    return section
