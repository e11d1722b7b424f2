"""On which terms a model or an adapter is loaded: those of a request, or of a restoration (restoration.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipeline.errors import ModelUnavailable


class LoadTerms(NamedTuple):
    """The defaults are those of a request."""

    is_wanted: Callable[[], bool] = lambda: True  # false if it is not to be loaded any more
    takes_standby: bool = True  # whether standby engines are ended if it does not fit otherwise
    standby_ended: Callable[[], object] = lambda: None  # called when some were

    def check(self, name: str) -> None:
        """Raise `ModelUnavailable` if a model or an adapter is not wanted any more."""
        if not self.is_wanted():
            raise ModelUnavailable(f"{name!r} was unloaded meanwhile", "model_id")


REQUESTED = LoadTerms()
