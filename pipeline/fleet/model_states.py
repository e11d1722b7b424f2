"""Groups of the states of models, and what orchestrators call the state of an engine that starts. Pure.

Agents send LOADING_TO_GPU alone, which orchestrators of every release accept.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from pipeline.fleet.bodies import HeartbeatResponse, ModelState

LOADING_STATES: tuple[ModelState, ...] = ("DOWNLOADING", "LOADING_TO_GPU", "LOADING")
HELD_STATES: tuple[ModelState, ...] = (*LOADING_STATES, "READY")  # of models that take an engine


def is_on_gpu(engine: str, *, has_gpu: bool) -> bool:
    """Whether an engine (`LoadedModel.engine`) computes on a GPU of its host, as far as can be told.

    vLLM does where there is one: its builds for CPUs are started in the same way.
    """
    return has_gpu and engine == "vllm"


def translate_loading(report: HeartbeatResponse) -> HeartbeatResponse:
    """A report with LOADING for LOADING_TO_GPU where the engine computes on the CPU."""
    if not any(one.model_state == "LOADING_TO_GPU" for one in report.loaded_models):
        return report
    has_gpu = not (report.gpu_utilization is UNSET and report.gpu_memory_free is UNSET)
    loaded = (
        msgspec.structs.replace(one, model_state="LOADING")
        if one.model_state == "LOADING_TO_GPU" and not is_on_gpu(one.engine, has_gpu=has_gpu)
        else one
        for one in report.loaded_models
    )
    return msgspec.structs.replace(report, loaded_models=tuple(loaded))
