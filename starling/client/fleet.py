"""Calls of an orchestrator's fleet API, with the fleet's token."""

from __future__ import annotations

import http.client
import json
from typing import Any

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import NotFound, StarlingError
from pipeline.fleet import token
from pipeline.supervise import listen_fd
from starling.client.address import ServerAddress, parse

TIMEOUT_S = 30.0


class FleetClient:
    """`url`: of an orchestrator; "" for the one of the configuration. `cacert`: who signed its certificate."""

    def __init__(self, config: Config, url: str = "", cacert: str = "") -> None:
        """Raises `InvalidRequest`, and `ConfigError` for a token that cannot be read."""
        bounds = config.fleet.orchestrator
        self.address = (
            parse(url, cacert=cacert) if url else ServerAddress("http", listen_fd.reachable(bounds.host), bounds.port)
        )
        self._headers = token.authorization(token.load_or_create(paths.fleet_token(config)))

    def get(self, path: str) -> Any:
        """The decoded answer. Raises `StarlingError`."""
        return self._call("GET", path, None)

    def post(self, path: str, **body: Any) -> Any:
        """The decoded answer. Raises `StarlingError`."""
        return self._call("POST", path, body)

    def is_ready(self) -> bool:
        """Whether /ready answers 200."""
        try:
            return bool(self.get("/ready")["ready"])
        except StarlingError:
            return False

    def _call(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        connection = self.address.connection(TIMEOUT_S)
        try:
            headers = {"Content-Type": "application/json", **self._headers}
            connection.request(method, self.address.target(path), data, headers)
            response = connection.getresponse()
            raw = response.read()
            answer = json.loads(raw)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StarlingError(
                "MODEL_UNAVAILABLE",
                f"no orchestrator answers at {self.address} ({error}); start one with `starling fleet up` or "
                "`starling orchestrator`, or name one with --url",
            ) from None
        finally:
            connection.close()
        if response.status != 200:
            refusal = answer.get("error", {}) if isinstance(answer, dict) else {}
            message = str(refusal.get("message") or f"{self.address}{path} answers with {response.status}")
            raise NotFound(message) if response.status == 404 else StarlingError("INTERNAL", message)
        return answer
