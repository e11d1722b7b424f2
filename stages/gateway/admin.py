"""What an operator may ask of the gateway over its control socket: `state`, `drain`, `resume`.

    {"op": "state"}
    {"op": "drain", "target": "all" or a model, "timeout_s": 30.0, "keep": true}
    {"op": "resume", "target": "all" or a model}

Every answer is the state after it.  Drains outlive this process in a small file beside the arenas, which
goes with the whole server.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import InvalidRequest
from stages.gateway.drains import ALL
from stages.gateway.service import Service

log = logging.getLogger("starling.gateway.admin")

MAX_TIMEOUT_S = 86_400.0


class Admin:
    """Answers for `service`; `kept` is where drains are written."""

    def __init__(self, service: Service, kept: Path) -> None:
        self._service = service
        self._kept = kept
        for target, timeout_s in self._read().items():
            service.drains.begin(target, timeout_s)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises `StarlingError`."""
        match request.get("op"):
            case "state":
                pass
            case "drain":
                self._drain(request)
            case "resume":
                self._resume(request)
            case other:
                raise InvalidRequest(f"op is {other!r}; there are state, drain and resume", "op")
        return self.state()

    def state(self) -> dict[str, Any]:
        service = self._service
        return {
            "in_flight": service.in_flight,
            "models": {model.name: service.in_flight_of(model.name) for model in service.config.models},
            "draining": service.drains.report(),
            "readiness": service.readiness(),
        }

    def _drain(self, request: dict[str, Any]) -> None:
        target = self._target(request)
        timeout_s = request.get("timeout_s", 0.0)
        if not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s <= MAX_TIMEOUT_S:
            raise InvalidRequest(f"timeout_s is {timeout_s!r}; it is from 0 to {MAX_TIMEOUT_S:g}", "timeout_s")
        self._service.drains.begin(target, float(timeout_s), request.get("keep") is not False)
        self._changed()
        log.info("drained by an operator", extra={"target": target, "timeout_s": timeout_s})

    def _resume(self, request: dict[str, Any]) -> None:
        target = self._target(request)
        lifted = self._service.drains.lift(target)
        self._changed()
        log.info("resumed by an operator", extra={"target": target, "lifted": lifted})

    def _target(self, request: dict[str, Any]) -> str:
        target = request.get("target", ALL)
        if not isinstance(target, str):
            raise InvalidRequest(f"target is {target!r}; it is {ALL!r} or a model's name", "target")
        return ALL if target == ALL else self._service.model_name(target)

    def _changed(self) -> None:
        self._service.notice_change()
        kept = self._service.drains.kept
        new = self._kept.with_name(self._kept.name + ".new")
        try:
            if kept:
                new.write_bytes(msgspec.json.encode(kept))
                os.replace(new, self._kept)
            else:
                self._kept.unlink(missing_ok=True)
        except OSError as error:  # in force all the same, until this process ends
            log.warning("a drain cannot be kept over a restart", extra={"error": str(error)})

    def _read(self) -> dict[str, float]:
        try:
            kept = msgspec.json.decode(self._kept.read_bytes(), type=dict[str, float])
        except (OSError, msgspec.DecodeError):
            return {}
        names = {ALL, *(model.name for model in self._service.config.models)}
        return {target: timeout_s for target, timeout_s in kept.items() if target in names}
