"""Compiles kernels while the caller fetches and converts the model: both wait, for the network and for the disk.

    with BackgroundBuild("f16") as kernels:
        ...
        kernels.wait(progress)

A thread feeds the compiler processes (build.py) and ends with the `with` block.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Self

from pipeline.runtime.process import use_default_time_slice
from stages.worker.kernels import amx_verdict, build, stored_code

REPORT_S = 0.2  # between two calls of `progress`


class BackgroundBuild:
    """One build for a type of KV cache; nothing if its kernels are in the cache. A context manager.

    `extra`: entries of `stored_code.EXTRA_ENTRIES` that are needed as well.
    `probe`: as of `build.build`.
    """

    def __init__(self, kv_type: str, jobs: int = 0, extra: tuple[str, ...] = (), probe: bool = False) -> None:
        self._kv_type, self._jobs, self._extra, self._probe = kv_type, jobs, extra, probe
        self._done, self._of = 0, len(stored_code.ENTRIES) + len(extra)  # what is in the cache, and all that is needed
        self._error: Exception | None = None
        self._cancel = -1  # an eventfd
        self._thread: threading.Thread | None = None
        self.took_s = 0.0  # from the start to the last kernel

    def __enter__(self) -> Self:
        is_compiled = stored_code.is_compiled(self._kv_type, self._extra)
        if not is_compiled or (self._probe and amx_verdict.needs_probe()):
            self._cancel = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="compile kernels", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:
            os.eventfd_write(self._cancel, 1)
            self._thread.join()
            os.close(self._cancel)
            self._thread = None

    def _run(self) -> None:
        begun = time.monotonic()
        use_default_time_slice()  # of the compiler's processes, too: a worker prepares itself with a short one
        try:
            build.build(self._kv_type, self._jobs, self._on_entry, self._cancel, self._extra, probe=self._probe)
        except Exception as error:
            self._error = error
        self.took_s = time.monotonic() - begun

    def _on_entry(self, name: str, done: int, of: int) -> None:
        self._done, self._of = done, of

    def wait(self, progress: build.Progress) -> None:
        """Wait for the last kernel. `progress` is called in this thread. Raises what `build` raises."""
        if self._thread is None:
            return
        while self._thread.is_alive():
            progress("compile kernels", self._done, self._of)
            self._thread.join(REPORT_S)
        if self._error is not None:
            raise self._error
        progress("compile kernels", self._of, self._of)
