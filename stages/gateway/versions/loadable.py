"""Which models a request may load: the configured ones and those that were pulled.

Their files must be on this machine: no request makes the server fetch anything.
"""

from __future__ import annotations

import math
from pathlib import Path

from pipeline.config.rules import check_name
from pipeline.config.schema import Config, ModelConfig
from pipeline.durations import seconds_of
from pipeline.models import registry


class LoadableModels:
    """Configured and pulled models. Reads the records of pulled ones, which may change while the server runs."""

    def __init__(self, config: Config, models_dir: Path) -> None:
        self._config = config
        self._models_dir = models_dir

    def settings(self, name: str) -> ModelConfig | None:
        """The settings of a model; None if it is neither configured nor pulled."""
        configured = self._config.model(name) if name else None
        if configured is not None or check_name(name):
            return configured
        settings = ModelConfig(name=name, preload=False)
        record = registry.read(self._models_dir, settings.slug)
        return settings if record is not None and record.name == name else None

    def names(self) -> list[str]:
        """The names of all, the configured ones first."""
        pulled = [record.name for record in registry.pulled(self._models_dir)]
        return list(dict.fromkeys((*(model.name for model in self._config.models), *pulled)))

    def keep_alive_s(self, settings: ModelConfig) -> float:
        """How long a model stays loaded after a request that does not say; infinite: for good."""
        if settings.keep_alive != "":
            return seconds_of(settings.keep_alive)
        return math.inf if settings.preload else seconds_of(self._config.on_demand.keep_alive)
