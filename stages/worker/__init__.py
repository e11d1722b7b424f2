"""The worker: ingest, kernels, ranks.

Its first import settles what numba compiles for and where it keeps it, before anything is compiled.
"""

from stages.worker.kernels.features import settle

settle()
