"""How property tests search: the same examples in every run of the suite, others and more with `make properties`.

An example that fails must not appear in one run of many, so the suite derives the examples from each test's source.
`make properties` sets `STARLING_PROPERTIES` to a factor: each run searches anew, with that many times the examples.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("STARLING_PROPERTIES", "0"))


def examples(usual: int) -> int:
    """Return how many examples a test tries that tries `usual` in the suite: for `settings(max_examples=...)`."""
    return usual * max(1, FACTOR)


def configure() -> None:
    """Set what holds for all property tests. Called once, before any of them is imported."""
    settings.register_profile(
        "starling",
        max_examples=examples(100),
        derandomize=not FACTOR,
        # On a machine without a free core any example may take long, and so may making one.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("starling")
