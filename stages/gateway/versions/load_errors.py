"""The error that requests get for a load on demand that has failed."""

from __future__ import annotations

import logging

from pipeline.errors import ModelDamaged, ModelUnavailable, StarlingError

log = logging.getLogger("starling.gateway.loader")

RETRY_AFTER_S = 5.0  # so long after a load that failed, requests get its error


def for_requests(model: str, error: StarlingError) -> StarlingError:
    """A new error for the requests that wait for the load. What only an operator can change is in the log alone.

    Such texts name files of the server, and their status would blame the request.  That of a damaged file names none,
    and no later request would find another one: it says what the operator must do, without Retry-After.
    """
    if error.code == ModelDamaged.CODE:
        log.error("a model cannot be loaded on demand", extra={"model": model, "reason": error.message})
        return ModelDamaged(error.message, "model")
    retry_after_s = error.retry_after_s or RETRY_AFTER_S
    if error.status < 500 and error.code != "MODEL_NOT_FOUND":
        log.error("a model cannot be loaded on demand", extra={"model": model, "reason": error.message})
        text = f"model {model!r} cannot be loaded; the gateway's log has the reason"
        return ModelUnavailable(text, "model", retry_after_s=retry_after_s)
    return StarlingError(error.code, error.message, error.param, retry_after_s=retry_after_s)
