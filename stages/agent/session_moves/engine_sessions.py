"""Sessions of this agent's engines, by the control socket of their KV manager (stages/kv/session_exchange.py).

What is sent passes through memory without a name: nothing is left if a process dies.  Bounded by the number of sessions
that are given or taken at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from pipeline.api.adapter_names import base_of
from pipeline.errors import InternalError, ModelUnavailable, Overloaded, ResourceError
from pipeline.files import write_all
from pipeline.fleet.bodies import (
    GiveSessionRequest,
    GiveSessionResponse,
    ListSessionsRequest,
    ListSessionsResponse,
    MoveSessionRequest,
    MoveSessionResponse,
    TakeSessionRequest,
    TakeSessionResponse,
)
from pipeline.ipc import control
from stages.agent.disk_threads import SESSIONS
from stages.agent.models import Models

CALL_S = 10.0  # of a call to the engine, which may wait for its disk
MAX_AT_ONCE = 8  # sessions that are given or taken: as many as there are threads for calls to engines


class EngineSessions:
    """One per agent, whose id is `agent_id`."""

    def __init__(self, models: Models, agent_id: str) -> None:
        self._models = models
        self._agent_id = agent_id
        self._n_sent = 0  # that are being given or taken

    async def list(self, asked: ListSessionsRequest) -> ListSessionsResponse:
        """The sessions of a model. Raises `StarlingError`."""
        found = await self._call(asked.model_id, do="list", after=asked.after, moving=asked.moving)
        return msgspec.convert({**found}, ListSessionsResponse)

    async def give(self, asked: GiveSessionRequest) -> GiveSessionResponse:
        """What another agent needs to go on with a session. Raises `StarlingError`."""
        memory = self._open()
        try:
            found = await self._call(
                asked.model_id,
                do="export",
                tenant=asked.tenant,
                session=asked.session,
                target=asked.agent_id,
                path=_path(memory),
                inode=os.fstat(memory).st_ino,
            )
            record = os.pread(memory, int(found["bytes"]), 0)
            if len(record) != found["bytes"]:
                raise InternalError(f"the engine has written {len(record)} of {found['bytes']} bytes of a session")
            return GiveSessionResponse(
                record=record,
                move=found["move"],
                tokens=int(found.get("tokens", 0)),
                tails=tuple(found.get("tails", ())),
                owner=str(found.get("owner", "")),
            )
        finally:
            self._close(memory)

    async def take(self, asked: TakeSessionRequest) -> TakeSessionResponse:
        """Keep a copy of a session. Raises `StarlingError`."""
        memory = self._open()
        try:
            write_all(memory, asked.record, 0)
            found = await self._call(asked.model_id, do="adopt", path=_path(memory))
            return TakeSessionResponse(move=found["move"])
        finally:
            self._close(memory)

    async def move(self, asked: MoveSessionRequest) -> MoveSessionResponse:
        """Do a step of a move. Raises `StarlingError`."""
        found = await self._call(
            asked.model_id,
            do=asked.step,
            tenant=asked.tenant,
            session=asked.session,
            move=asked.move,
            target=asked.agent_id,
            tokens=asked.tokens,
        )
        return MoveSessionResponse(
            given_up=bool(found.get("given_up", False)),
            gone=bool(found.get("gone", False)),
        )

    def _open(self) -> int:
        """Memory for what is sent. Raises `Overloaded`, `ResourceError`."""
        if self._n_sent >= MAX_AT_ONCE:
            raise Overloaded(f"{self._n_sent} sessions are being given or taken", retry_after_s=1.0)
        try:
            memory = os.memfd_create("session", os.MFD_CLOEXEC)
        except OSError as error:
            raise ResourceError(
                f"memory for a session cannot be made: {error.strerror}; raise the limits of the agent's process"
            ) from None
        self._n_sent += 1
        return memory

    def _close(self, memory: int) -> None:
        os.close(memory)
        self._n_sent -= 1

    async def _call(self, model: str, **fields: Any) -> dict[str, Any]:
        run_dir = self._run_dir(model)
        request = {"op": "session", "model": base_of(model), "agent": self._agent_id, **fields}
        # Cancelled, the call goes on: until its end the memory that it names must be there.
        return await SESSIONS.uninterrupted(control.call, run_dir, "kv", request, CALL_S)

    def _run_dir(self, model: str) -> Path:
        placement = self._models.find(model)
        run_dir = placement.engine.control_dir if placement.engine is not None else None
        if placement.state != "READY" or run_dir is None:
            raise ModelUnavailable(f"no engine of {model!r} has sessions here", "model_id")
        return run_dir


def _path(memory: int) -> str:
    return f"/proc/{os.getpid()}/fd/{memory}"
