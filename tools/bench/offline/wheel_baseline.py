"""llama.cpp through the wheel `xllamacpp` (`make peers`), which is compiled for AVX2.

It is driven as a llama.cpp that is compiled here (native_baseline.py): the wheel exports the same functions.
"""

from __future__ import annotations

from typing import Any

from tools.bench.offline.native_baseline import NativeBaseline
from tools.reference.peer_context import check_layout, load_library


class WheelBaseline(NativeBaseline):
    """llama.cpp in the child process. Raises `ImportError` without the wheel, `RuntimeError` for another layout."""

    def _library(self) -> Any:
        library = load_library()
        check_layout(library.llama_context_default_params())
        return library

    def _about(self) -> dict[str, Any]:
        import xllamacpp

        return {
            "version": xllamacpp.__version__,
            "build": xllamacpp.BUILD_INFO,
            "cpu": xllamacpp.get_system_info().strip(" |"),
        }
