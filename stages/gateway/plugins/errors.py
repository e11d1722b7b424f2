"""The errors of plugins. Each names the plugin."""

from __future__ import annotations

from pipeline.errors import StarlingError
from stages.gateway.plugins.frames import Failed


def failed(name: str, hook: str, reason: str, *, is_temporary: bool) -> StarlingError:
    """Return the error of a request for which a hook has no result. `is_temporary`: it may have one later."""
    if is_temporary:
        return StarlingError("PLUGIN_UNAVAILABLE", f"plugin {name!r} ({hook}): {reason}; try again", retry_after_s=1.0)
    return StarlingError(
        "PLUGIN_FAILED",
        f"plugin {name!r} failed in {hook}: {reason}; the server's log has the details, its operator can repair or "
        "remove the plugin",
    )


def refused(name: str, reply: Failed) -> StarlingError:
    """Return the error of a request that a plugin refuses."""
    return StarlingError("REFUSED_BY_PLUGIN", f"plugin {name!r} refused the request: {reply.message}", reply.param)
