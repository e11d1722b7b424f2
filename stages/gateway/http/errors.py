"""Errors as aiohttp responses, and aiohttp's own errors as `StarlingError`s."""

from __future__ import annotations

from aiohttp import web

from pipeline.api.error_response import error_response
from pipeline.api.json_body import CONTENT_TYPE
from pipeline.api.unsupported_paths import unsupported_path
from pipeline.config.schema import Config
from pipeline.errors import NotFound, StarlingError, method_not_allowed
from stages.gateway.http.context import is_anthropic, request_id
from stages.gateway.http.request_body import body_too_large
from stages.gateway.http.text_endpoints import TEXT_ENDPOINTS


def to_response(request: web.Request, error: StarlingError) -> web.Response:
    """Return the HTTP response that reports `error`, in the form of the request's API."""
    response = error_response(error, is_anthropic=is_anthropic(request), request_id=request_id(request))
    return web.Response(body=response.body, status=response.status, headers=response.headers, content_type=CONTENT_TYPE)


def error_of(request: web.Request, rejected: web.HTTPException, config: Config) -> StarlingError:
    """Return the error for a request that aiohttp has rejected."""
    match rejected:
        case web.HTTPRequestEntityTooLarge():
            return body_too_large(config)
        case web.HTTPMethodNotAllowed():
            return method_not_allowed(request.path, request.method, rejected.allowed_methods)
        case web.HTTPNotFound():
            if unsupported := unsupported_path(request.path):
                return unsupported
            paths = ", ".join(endpoint.path for endpoint in TEXT_ENDPOINTS)
            return NotFound(f"unknown path {request.path[:200]}; the paths for text are {paths}")
    return StarlingError("INVALID_REQUEST", rejected.reason, status=rejected.status)
