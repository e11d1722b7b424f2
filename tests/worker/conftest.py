"""Tiny random models and checkpoints, written once a session."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.worker.checkpoint.ingest import ingest
from tests.amx_machine import Machine, has_amx, machine, refusal
from tools.tiny_gguf import SHAPES, write_model

TinyGguf = Callable[..., Path]
Ingested = Callable[[Path], Path]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGguf:
    """`tiny_gguf(shape, recipe, seed=0)`: path of a model; names as in tools/tiny_gguf.py."""
    directory = tmp_path_factory.mktemp("tiny")

    def get(shape: str = "small", recipe: str = "Q4_1", seed: int = 0) -> Path:
        path = directory / f"{shape}-{recipe}-{seed}.gguf"
        return path if path.exists() else write_model(path, SHAPES[shape], recipe, seed)

    return get


@pytest.fixture(scope="session")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> Ingested:
    """`ingested(gguf)`: the `.idx` of a model, made at the first call."""
    directory = tmp_path_factory.mktemp("ingested")

    def get(source: Path) -> Path:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        index_path = directory / f"{digest}.idx"
        if not index_path.exists():
            ingest(source, index_path, digest)
        return index_path

    return get


@pytest.fixture(scope="session")
def amx_machine() -> Iterator[Machine]:
    """A machine with AMX, emulated on a CPU without it; where the system lets none be, the test is skipped."""
    if reason := refusal():
        pytest.skip(reason)
    with machine() as found:
        yield found


IsaEnvironment = Callable[[str], dict[str, str]]


@pytest.fixture(scope="session")
def isa_environment(request: pytest.FixtureRequest) -> IsaEnvironment:
    """`isa_environment(isa)`: the variables of a process with an instruction set; `amx` on an emulated machine."""

    def get(isa: str) -> dict[str, str]:
        environment = {"STARLING_ISA": isa}
        if isa == "amx" and not has_amx():
            environment |= request.getfixturevalue("amx_machine").environment
        return environment

    return get
