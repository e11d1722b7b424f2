"""What an operator may ask of the gateway: `state`, `drain`, `resume`.

Over its control socket, or over HTTP with an admin's key (the same fields in the body, the op in the path):

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
FIELDS = {"state": (), "drain": ("target", "timeout_s", "keep"), "resume": ("target",)}


class Admin:
    """Answers for `service`; `kept` is where drains are written."""

    def __init__(self, service: Service, kept: Path) -> None:
        self._service = service
        self._kept = kept
        for target, timeout_s in self._read().items():
            service.drains.begin(target, timeout_s)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises `StarlingError`."""
        op = request.get("op")
        if not isinstance(op, str) or op not in FIELDS:
            raise InvalidRequest(f"op is {op!r}; there are {', '.join(FIELDS)}", "op")
        for name in request:
            if name != "op" and name not in FIELDS[op]:
                known = ", ".join(FIELDS[op]) or "none"
                raise InvalidRequest(f"{op} has no field {name[:100]!r}; its fields: {known}", name[:100])
        if op == "drain":
            self._drain(request)
        elif op == "resume":
            self._resume(request)
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
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s <= MAX_TIMEOUT_S:
            raise InvalidRequest(f"timeout_s is {timeout_s!r}; it is from 0 to {MAX_TIMEOUT_S:g}", "timeout_s")
        is_kept = request.get("keep", True)
        if not isinstance(is_kept, bool):
            raise InvalidRequest(f"keep is {is_kept!r}; it is true or false", "keep")
        self._service.drains.begin(target, float(timeout_s), is_kept)
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
