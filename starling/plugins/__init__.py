"""What the author of a plugin imports; docs/plugins.md describes plugins.

from starling.plugins import InferenceRequest, InferenceResponse, Plugin, Refused
"""

from __future__ import annotations

from stages.gateway.plugins.interface import InferenceRequest, InferenceResponse, Plugin, Refused

__all__ = ["InferenceRequest", "InferenceResponse", "Plugin", "Refused"]
