"""Compiles the kernels of the tokenizer into a directory: a process of its own, because it needs numba.

    python -m stages.tokenizer.kernels.compile DIRECTORY PID

PID is the parent process, with which the compiler ends.  compiled.py starts it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.native import link_once, object_file
from pipeline.runtime import process
from stages.tokenizer.kernels import compiled
from stages.tokenizer.kernels.cut_words import cut_words
from stages.tokenizer.kernels.merge_words import merge_words
from stages.tokenizer.kernels.pairs import OPTIONS


def main(directory: str, parent: str) -> None:
    """Compile them and store their object code."""
    process.die_with_parent(int(parent))
    if Path(directory).name != compiled.directory().name:
        sys.exit("the sources have changed since it was asked for")
    link_once.install()
    functions = {compiled.MERGE_WORDS: merge_words, compiled.CUT_WORDS: cut_words}
    for name in compiled.NAMES:
        if not object_file.symbol_path(Path(directory), name).exists():
            object_file.store(Path(directory), name, *link_once.entry_object(functions[name], 1, OPTIONS))


if __name__ == "__main__":
    main(*sys.argv[1:])
