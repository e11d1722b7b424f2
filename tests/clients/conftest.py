"""Client libraries and frameworks, as their users have them, against one server: `make test-clients`.

They have a virtual environment of their own, .venv.clients, in which neither Starling nor the other tests can be
imported. The ordinary run of the tests leaves this folder out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from pydantic import BaseModel, Field

URL = os.environ.get("STARLING_CLIENTS_URL", "")

if not URL:
    collect_ignore_glob = ["test_*.py"]


@dataclass(frozen=True)
class Target:
    """The server under test."""

    root: str
    model: str
    key: str

    @property
    def v1(self) -> str:
        return self.root + "/v1"


class Person(BaseModel):
    """A person. Bounded, so that every answer is short enough to be complete."""

    name: str = Field(max_length=12, min_length=1)
    age: int = Field(ge=0, le=120)
    is_member: bool


@pytest.fixture(scope="session")
def target() -> Target:
    return Target(URL, os.environ["STARLING_CLIENTS_MODEL"], os.environ["STARLING_CLIENTS_KEY"])


@pytest.fixture(scope="session")
def person() -> type[Person]:
    return Person
