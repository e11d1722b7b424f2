"""Finds the class of a configured plugin: the one that the configuration names, or an installed entry point.

Only the metadata of installed packages is read; the process of the plugin imports it.
"""

from __future__ import annotations

import re

from pipeline.config.schema import PluginConfig
from pipeline.errors import ConfigError

GROUP = "starling.plugins"
_OBJECT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def object_of(plugin: PluginConfig) -> str:
    """Return MODULE:CLASS. Raises `ConfigError`, whose `param` is the key of the plugin."""
    if plugin.object:
        if not _OBJECT.fullmatch(plugin.object):
            raise ConfigError(f"expected MODULE:CLASS, as my_package.plugin:Plugin, got {plugin.object!r}", "object")
        return plugin.object
    from importlib.metadata import entry_points  # 10 ms that servers without plugins save

    found = {point.name: point.value for point in entry_points(group=GROUP)}
    if plugin.name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ConfigError(
            f"no installed package has an entry point {plugin.name!r} in the group {GROUP} (there are: {known}); "
            "install it, or give object: MODULE:CLASS",
            "name",
        )
    return found[plugin.name]
