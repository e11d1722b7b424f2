"""Calls of an orchestrator's fleet API, with the fleet's token."""

from __future__ import annotations

import http.client
import json
from typing import Any

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, InvalidRequest, NotFound, StarlingError
from pipeline.fleet import token
from pipeline.supervise import listen_fd
from starling.client.address import ServerAddress, parse

TIMEOUT_S = 30.0
MAX_ANSWER = 64 << 20  # bytes; that of 1,000 agents with 100 files each has about 30 MB


class FleetClient:
    """`url`: of an orchestrator; "" for the one of the configuration. `cacert`: who signed its certificate."""

    def __init__(self, config: Config, url: str = "", cacert: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: for each step of a call. Raises `InvalidRequest`."""
        bounds = config.fleet.orchestrator
        self.address = (
            parse(url, cacert=cacert) if url else ServerAddress("http", listen_fd.reachable(bounds.host), bounds.port)
        )
        self._token_file = paths.fleet_token(config)
        self._timeout_s = timeout_s

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
        """Raises `NotFound`, `InvalidRequest`, `ConfigError` and other kinds of `StarlingError`."""
        data = None if body is None else json.dumps(body).encode()
        # Read for each call, and never made: the orchestrator makes it, on one of the machines.
        secret = token.load(self._token_file)
        connection = self.address.connection(self._timeout_s)
        try:
            headers = {"Content-Type": "application/json", **(token.authorization(secret) if secret else {})}
            connection.request(method, self.address.target(path), data, headers)
            response = connection.getresponse()
            raw = response.read(MAX_ANSWER + 1)
            if len(raw) > MAX_ANSWER:
                raise ValueError(f"an answer of more than {MAX_ANSWER:,} bytes")
            answer = json.loads(raw)
            if not isinstance(answer, dict):
                raise ValueError("an answer that is no object")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StarlingError(
                "MODEL_UNAVAILABLE",
                f"no orchestrator answers at {self.address} ({error}); start one with `starling fleet up` or "
                "`starling orchestrator`, or name one with --url",
            ) from None
        finally:
            connection.close()
        if response.status != 200:
            raise self._refusal(response.status, answer, path, bool(secret))
        return answer

    def _refusal(self, status: int, answer: dict[str, Any], path: str, has_token: bool) -> StarlingError:
        """The error that an answer stands for."""
        refusal = answer.get("error")
        message = str(refusal.get("message") or "") if isinstance(refusal, dict) else ""
        message = message or f"{self.address}{path} answers with {status}"
        match status:
            case 400:
                return InvalidRequest(message)
            case 404:
                return NotFound(message)
            case 401 | 403 if not has_token:
                return ConfigError(
                    f"{self._token_file} does not exist: copy the file from a machine of the fleet at {self.address}, "
                    "or name it in fleet.token",
                    "fleet.token",
                )
            case 401 | 403:
                return ConfigError(f"{self.address} does not accept {self._token_file}: {message}", "fleet.token")
        return StarlingError("INTERNAL", message)
