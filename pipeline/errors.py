"""All errors: one tree of exceptions and one table of codes.

    StarlingError                any code; (code, message, param) is what crosses process boundaries
    ├── ConfigError              CONFIG                 500  a setting is wrong; the server does not start
    │   └── ModelDamaged         MODEL_DAMAGED          500  a stored file is not the one that was pulled
    ├── InvalidRequest           INVALID_REQUEST        400  the request is wrong; `param` names the field
    ├── Unauthenticated          INVALID_API_KEY        401  no API key, or an unknown one
    ├── Forbidden                FORBIDDEN              403  the key is known and lacks the permission
    ├── NotFound                 NOT_FOUND              404  the object does not exist (any more)
    │   ├── ModelNotFound        MODEL_NOT_FOUND        404
    │   └── SessionMoved         SESSION_MOVED          404  another agent of the fleet has the session
    ├── Conflict                 CONFLICT               409  in use by another request
    ├── TooLarge                 REQUEST_TOO_LARGE      413  the body exceeds `server.max_body_mb`
    ├── RateLimited              RATE_LIMITED           429  a quota is used up for now (QUOTA_EXHAUSTED: for good)
    ├── Overloaded               OVERLOADED             429  a queue is full
    ├── ModelUnavailable         MODEL_UNAVAILABLE      503  loading, draining, or its workers are down
    │   └── NotOnThisHost        MODEL_UNAVAILABLE      503  this host's memory or configuration does not allow it
    ├── StorageUnavailable       STORAGE_UNAVAILABLE    503  a disk, a database or a blob store fails; a retry may help
    │   └── DiskFailed           STORAGE_UNAVAILABLE    503  a disk of this machine cannot be written
    ├── ResourceError            INSUFFICIENT_RESOURCES 507  it can never fit (memory, disk, pages)
    ├── InferenceError           INFERENCE              500  the computation failed
    └── InternalError            INTERNAL               500  a fault of the server

`CODES` has the HTTP status and the OpenAI-style `type` of each code, including codes without a class of their own.
Messages name the field, the value, the bound and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple


class Code(NamedTuple):
    """How a code appears over HTTP."""

    status: int  # HTTP
    type: str  # the `type` of the HTTP error body
    retry: bool = False  # the same request may succeed later: send Retry-After
    is_final: bool = False  # it cannot, although clients repeat others with this status: send x-should-retry


CODES: dict[str, Code] = {
    "INVALID_REQUEST": Code(400, "invalid_request_error"),
    "CONTEXT_LENGTH_EXCEEDED": Code(400, "invalid_request_error"),
    "INVALID_API_KEY": Code(401, "authentication_error"),
    "FORBIDDEN": Code(403, "permission_error"),
    "NOT_FOUND": Code(404, "not_found_error"),
    "MODEL_NOT_FOUND": Code(404, "not_found_error"),
    "SESSION_MOVED": Code(404, "not_found_error"),
    "METHOD_NOT_ALLOWED": Code(405, "invalid_request_error"),
    "CONFLICT": Code(409, "conflict_error"),
    "REQUEST_TOO_LARGE": Code(413, "invalid_request_error"),
    "RATE_LIMITED": Code(429, "rate_limit_error", True),
    "QUOTA_EXHAUSTED": Code(429, "insufficient_quota", is_final=True),
    "OVERLOADED": Code(429, "overloaded_error", True),
    "MODEL_UNAVAILABLE": Code(503, "unavailable_error", True),
    "STORAGE_UNAVAILABLE": Code(503, "unavailable_error", True),
    "DRAINING": Code(503, "unavailable_error", True),
    "TIMEOUT": Code(503, "timeout_error"),
    "NOT_IMPLEMENTED": Code(501, "not_implemented_error", is_final=True),
    "INSUFFICIENT_RESOURCES": Code(507, "resource_error", is_final=True),
    "PLUGIN_UNAVAILABLE": Code(503, "unavailable_error", True),
    "PLUGIN_FAILED": Code(500, "plugin_error"),
    "REFUSED_BY_PLUGIN": Code(400, "invalid_request_error"),
    "INFERENCE": Code(500, "inference_error"),
    "CACHE": Code(500, "cache_error"),
    "CONFIG": Code(500, "config_error"),
    "MODEL_DAMAGED": Code(500, "config_error", is_final=True),
    "INTERNAL": Code(500, "internal_error"),
}


MOVED_TO = "X-Starling-Moved-To"  # header: the agent that has the session of SESSION_MOVED
SHOULD_RETRY = "x-should-retry"  # header: false ends the attempts of the clients of OpenAI and Anthropic


class StarlingError(Exception):
    """An error with a code of `CODES`.

    `param` is the dotted name of the field at fault, "" when there is none.  `status` overrides the
    code's HTTP status (0: does not).  `retry_after_s` goes into `Retry-After`; 0: unknown.
    An unknown code (from a newer peer) is treated as INTERNAL.
    """

    def __init__(
        self, code: str, message: str, param: str = "", *, status: int = 0, retry_after_s: float = 0.0
    ) -> None:
        # A quoted header may have bytes that are not UTF-8: lone surrogates, which neither JSON nor a frame can have.
        message = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(message)
        known = CODES.get(code, CODES["INTERNAL"])
        self.code = code
        self.message = message
        self.param = param
        self.status = status or known.status
        self.type = known.type
        self.retry_after_s = retry_after_s
        self.is_final = known.is_final  # clients are not to send the request again
        self.names: tuple[str, str] = ("", "")  # the model and the session of a refused body, for the log
        self.moved_to = ""  # agent that has the session of SESSION_MOVED
        self.allowed = ""  # methods that METHOD_NOT_ALLOWED names, in `Allow`

    def __repr__(self) -> str:
        where = f", param={self.param!r}" if self.param else ""
        return f"{type(self).__name__}({self.code}: {self.message}{where})"

    def body(self) -> dict[str, Any]:
        """The HTTP body: `{"error": {"message", "type", "code", "param"}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "code": self.code,
                "param": self.param or None,
            }
        }

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds (at least 1) when the same request may succeed later; `x-should-retry`."""
        if self.is_final:
            return {SHOULD_RETRY: "false"}  # the clients of OpenAI and Anthropic repeat others with 409, 429 or 5xx
        if self.moved_to:
            return {MOVED_TO: self.moved_to}
        if self.allowed:
            return {"Allow": self.allowed}
        retry = CODES.get(self.code, CODES["INTERNAL"]).retry
        if not retry and not self.retry_after_s:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


class _Kind(StarlingError):
    """A category with a default code; `code` may be a more specific one."""

    CODE = "INTERNAL"

    def __init__(
        self, message: str, param: str = "", *, code: str = "", status: int = 0, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(code or self.CODE, message, param, status=status, retry_after_s=retry_after_s)


def method_not_allowed(path: str, method: str, allowed: Iterable[str]) -> StarlingError:
    """The error for a path that has other methods."""
    names = ", ".join(sorted(allowed))
    error = StarlingError("METHOD_NOT_ALLOWED", f"{path[:200]} does not allow {method}; use {names}")
    error.allowed = names
    return error


class ConfigError(_Kind):
    """A setting is wrong, and the server does not start."""

    CODE = "CONFIG"


class ModelDamaged(ConfigError):
    """A stored file of a model is not the one that was pulled. The text is for clients, too: it names no path."""

    CODE = "MODEL_DAMAGED"


class InvalidRequest(_Kind):
    """The request is wrong; `param` names the field."""

    CODE = "INVALID_REQUEST"


class Unauthenticated(_Kind):
    """No API key, or an unknown one."""

    CODE = "INVALID_API_KEY"


class Forbidden(_Kind):
    """The API key lacks the permission."""

    CODE = "FORBIDDEN"


class NotFound(_Kind):
    """The object does not exist."""

    CODE = "NOT_FOUND"


class ModelNotFound(NotFound):
    """No model of that name is loaded."""

    CODE = "MODEL_NOT_FOUND"


class SessionMoved(NotFound):
    """Another agent of the fleet has the session, `moved_to`; orchestrators send the request there."""

    CODE = "SESSION_MOVED"


class Conflict(_Kind):
    """The object is in use by another request."""

    CODE = "CONFLICT"


def cancelled_by_client(what: str = "request") -> Conflict:
    """The error of what is not to be started again."""
    error = Conflict(f"the {what} was cancelled by its client")
    error.is_final = True
    return error


class TooLarge(_Kind):
    """The body exceeds `server.max_body_mb`."""

    CODE = "REQUEST_TOO_LARGE"


class RateLimited(_Kind):
    """A quota of the tenant or of its key is used up."""

    CODE = "RATE_LIMITED"


class Overloaded(_Kind):
    """A queue is full."""

    CODE = "OVERLOADED"


class ModelUnavailable(_Kind):
    """The model is loading or draining, or its workers are down."""

    CODE = "MODEL_UNAVAILABLE"


class NotOnThisHost(ModelUnavailable):
    """The host does not get it before an operator changes something; another host may."""


class StorageUnavailable(_Kind):
    """A disk or a database fails, or a blob store does not answer, or gives another answer than was requested."""

    CODE = "STORAGE_UNAVAILABLE"


class DiskFailed(StorageUnavailable):
    """A disk of this machine cannot be written, for another reason than want of room."""


class ResourceError(_Kind):
    """It can never fit into memory, disk or pages."""

    CODE = "INSUFFICIENT_RESOURCES"


class InferenceError(_Kind):
    """The computation failed."""

    CODE = "INFERENCE"


class InternalError(_Kind):
    """A fault of the server."""

    CODE = "INTERNAL"
