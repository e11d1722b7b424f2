"""Compiles `merge_words` into a directory: a process of its own, because it needs numba.

    python -m stages.tokenizer.kernels.compile DIRECTORY PID

PID is the parent process, with which the compiler ends.  compiled.py starts it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.native import link_once, object_file
from pipeline.runtime import process
from stages.tokenizer.kernels import compiled
from stages.tokenizer.kernels.compiled import NAME
from stages.tokenizer.kernels.merge_words import OPTIONS, merge_words


def main(directory: str, parent: str) -> None:
    """Compile it and store its object code."""
    process.die_with_parent(int(parent))
    if Path(directory).name != compiled.directory().name:
        sys.exit("the sources have changed since it was asked for")
    link_once.install()
    object_file.store(Path(directory), NAME, *link_once.entry_object(merge_words, 1, OPTIONS))


if __name__ == "__main__":
    main(*sys.argv[1:])
