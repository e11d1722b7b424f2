"""The worker: ingest, kernels, ranks.

Its first import settles what numba compiles for and where it keeps it, before anything is compiled. Raises
`UnsupportedCpu`, and `ResourceError` if that place cannot be written.
"""

from pipeline.errors import ResourceError
from stages.worker.kernels.features import cache_dir, settle

try:
    settle()
except OSError as error:
    raise ResourceError(
        f"compiled kernels are kept in {cache_dir()}, which cannot be written: {error.strerror}; free space there, "
        "make it writable, or move it with STARLING_HOME"
    ) from None
