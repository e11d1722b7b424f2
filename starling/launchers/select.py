"""The launcher of a name. Its module is imported when it is asked for."""

from __future__ import annotations

from typing import get_args, get_type_hints

from pipeline.config.schema import Config, FleetConfig
from starling.launchers.interface import Launcher

NAMES: tuple[str, ...] = get_args(get_type_hints(FleetConfig)["launcher"])


def open_launcher(config: Config, name: str | None = None) -> Launcher:
    """The launcher `name`, by default that of the configuration."""
    match name or config.fleet.launcher:
        case "kubernetes":
            from starling.launchers.kubernetes import KubernetesLauncher

            return KubernetesLauncher(config.fleet)
        case "ray":
            from starling.launchers.ray_cluster import RayLauncher

            return RayLauncher(config.fleet)
        case "systemd":
            from starling.launchers.systemd import SystemdLauncher

            return SystemdLauncher()
    from starling.launchers.local import LocalLauncher

    return LocalLauncher()
