"""What the agent asks of an engine.  One object is one start of one program with one model.

    start     begin; what an earlier engine of the same model has left is dead afterwards
    ready     wait until it answers requests
    ended     wait for its end, or for its silence
    queue     what it computes, and what waits
    suspend   take no more requests; resume: take them again
    stop      end it in order, and everything that belongs to it
    load_adapter, unload_adapter   change which LoRA adapters requests may name, while it serves
    capabilities   what the orchestrators may expect of its answers

`load` and `unload` of a model are `start` and `stop`: a dead engine takes no other model with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pipeline.errors import InferenceError, StarlingError


class Capabilities(NamedTuple):
    """What an engine promises."""

    kv_type: str = ""  # and `Index.revision`
    numerics: int = 0  # version of the arithmetic: equal ones give equal bytes; 0: no promise
    can_continue: bool = False  # from the output tokens of another engine of the same version
    page_tokens: int = 0  # of a KV page; 0: it exchanges none
    takes_conversations: bool = False  # of orchestrators, before requests for /v1/responses
    continues_text: bool = False  # from the text of another engine of the same kind and model: not the same bytes


class AdapterFile(NamedTuple):
    """A published LoRA adapter on this host."""

    name: str  # requests ask for MODEL:NAME
    digest: str  # SHA-256 of its file
    path: Path
    nbytes: int


class AdapterUse(NamedTuple):
    """Requests that named an adapter."""

    running: int = 0
    ended: int = 0  # since the engine started


class Queue(NamedTuple):
    """Sequences."""

    running: int = 0
    waiting: int = 0
    hit_rate: float = 0.0  # of KV pages, since the engine started
    submitted: int = 0  # since then
    sessions: int = 0  # that it holds
    sessions_moving: int = 0  # whose move is not complete
    adapters: Mapping[str, AdapterUse] = MappingProxyType({})  # by name


class EngineDied(InferenceError):
    """The engine has ended. `is_final`: another start would end the same way."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class Engine(ABC):
    """One start of an engine."""

    adapter: str  # name, as in heartbeats
    capabilities: Capabilities
    url: str = ""  # http://HOST:PORT, once it is started
    key: str = ""  # API key that it requires
    adapters: tuple[AdapterFile, ...] = ()  # with which it is started; set before `start`
    kv_arenas: Path | None = None  # the directory of its KV arenas (shm/pages.py); None: it has none

    control_dir: Path | None = (
        None  # with the control sockets of its stages (pipeline/ipc/control.py); None: it has none
    )

    @abstractmethod
    async def start(self) -> None:
        """Begin. Raises `StarlingError` if it cannot."""

    @abstractmethod
    async def ready(self) -> None:
        """Wait until it answers. Raises `EngineDied`."""

    @abstractmethod
    async def ended(self) -> EngineDied:
        """Wait for its end; the reason."""

    @abstractmethod
    async def queue(self) -> Queue:
        """What it does now. Raises `EngineDied` if it does not answer."""

    @abstractmethod
    async def suspend(self) -> None:
        """Take no more requests and end those in flight. Raises `EngineDied` if it does not answer in time."""

    @abstractmethod
    async def resume(self) -> None:
        """Take requests again. Raises `EngineDied`."""

    @abstractmethod
    async def stop(self, *, at_once: bool = False) -> None:
        """End it, and return when no process of it is left. `at_once`: without finishing streams. Idempotent."""

    async def load_adapter(self, added: AdapterFile, within_s: float) -> None:
        """Let requests name an adapter, which replaces one of its name. Raises `EngineDied`, other `StarlingError`."""
        raise self._no_adapters()

    async def unload_adapter(self, name: str, within_s: float) -> None:
        """Remove an adapter; its requests finish. Idempotent. Raises `EngineDied`, other `StarlingError`."""
        raise self._no_adapters()

    def _no_adapters(self) -> StarlingError:
        return no_adapters(self.adapter)


def no_adapters(engine: str) -> StarlingError:
    """The refusal of an engine that serves no published adapters."""
    return StarlingError(
        "NOT_IMPLEMENTED",
        f"published adapters are prepared for the engine starling, and this model is computed by {engine}: ask for the "
        f"model without an adapter, or give {engine} the adapter in its own arguments",
        "model",
    )
