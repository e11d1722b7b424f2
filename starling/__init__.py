"""Starling: an LLM inference server, and the same engine inside one Python process.

    import starling

    with starling.Embedded.load("model.gguf") as engine:
        print(engine.generate("Once upon a time", max_tokens=32).text)

`starling.__version__` is the installed version, `starling.Embedded` the in-process engine (docs/embedded.md).
The server's command line is `starling.cli`.  Both names are resolved at their first use, so that importing the
package loads neither NumPy nor compiled kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starling.embedded import Embedded

    __version__: str

__all__ = ["Embedded", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Embedded":
        from starling.embedded import Embedded

        return Embedded
    if name == "__version__":
        from importlib.metadata import version

        return version("starling")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
