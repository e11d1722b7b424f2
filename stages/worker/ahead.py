"""What a worker group prepares on a thread while the scheduler and kv make their arenas for it.

The activations arena of the geometry that they will ask for, and the weights mapped into rank 0, until `close`; the
other ranks map theirs (ranks.py).  Only for a version that a request or a self-test waits for (one that is loaded while
the server runs, or by an agent): others compute dummy passes.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

import numpy as np

from pipeline.errors import StarlingError
from shm.arena import Arena, ArenaError
from stages.worker.activations_arena import ActivationsGeometry
from stages.worker.mapped_weights import map_weights

log = logging.getLogger("starling.worker")


class Ahead:
    """`make` creates the arena of a geometry, `weights` is what rank 0 maps of the checkpoint."""

    def __init__(
        self, geometry: ActivationsGeometry, make: Callable[[ActivationsGeometry], Arena], weights: np.ndarray
    ) -> None:
        self._geometry = geometry
        self._make = make
        self._weights = weights
        self._arena: Arena | None = None
        self._is_made = threading.Event()  # or it cannot be
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        # Signals are the main thread's: one that this thread took would not end the main thread's poll().
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def take(self, geometry: ActivationsGeometry) -> Arena | None:
        """The arena, if it has that geometry; only once. Another one is closed, and its file stays to be replaced."""
        self._is_made.wait()
        arena, self._arena = self._arena, None
        if arena is not None and geometry != self._geometry:
            arena.close()
            return None
        return arena

    def close(self) -> None:
        """Remove the arena if it was not taken, and map no more weights. Idempotent."""
        self._is_closed = True
        self._is_made.wait()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()
            arena.unlink()

    def _run(self) -> None:
        try:
            self._arena = self._make(self._geometry)
        except (ArenaError, OSError, ValueError, StarlingError) as error:  # the attachment tries it again
            log.info("no activations arena ahead", extra={"reason": str(error)})
        finally:
            self._is_made.set()
        map_weights(self._weights, lambda: not self._is_closed)
