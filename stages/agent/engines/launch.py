"""`python -m stages.agent.engines.launch MEMORY_MB PROGRAM ARG...`: becomes a program that ends with the agent.

The program is killed when its parent ends, writes no core files, and may allocate MEMORY_MB (0: no bound) besides what
it maps from files.  The limits hold for its children, too.
"""

from __future__ import annotations

import os
import resource
import sys

from pipeline.runtime.process import EXIT_CONFIG, die_with_parent


def main(arguments: list[str]) -> None:
    """Never returns."""
    memory_mb, *command = arguments
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes := int(memory_mb) << 20:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"starling: {command[0]} cannot be run: {error.strerror}", flush=True)
        os._exit(EXIT_CONFIG)


if __name__ == "__main__":
    main(sys.argv[1:])
