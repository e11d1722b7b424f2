"""Run the tests that have failed once more, alone: `python -m tools.confirm_failures CACHE [OPTION...]`.

CACHE is the cache directory of the run that failed, and options are those of pytest. Where several processes run tests
at once, a thread or a server may have no core for seconds: then a test may fail that assumes that something takes less.
One that fails alone, at any of `TIMES` runs, has failed. So have more than `MOST` tests: those are no accident.

The exit code is 0 if all pass each time. They are named then: each of them has a fault, or has shown one, that is to
be mended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 2  # tests
TIMES = 3  # runs of each
UNSTABLE = "failed once, and passed alone {} times; find out why and mend it: {}"


def failed_tests(cache: Path) -> list[str]:
    """Names of the tests that failed in the last run. Raises `OSError`, `ValueError`."""
    return sorted(json.loads((cache / "v" / "cache" / "lastfailed").read_text()))


def main(arguments: list[str]) -> int:
    """Run the tests again and return the exit code."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        failed = failed_tests(Path(arguments[0]))
    except (OSError, ValueError) as error:
        print(f"which tests have failed is not known: {error}", file=sys.stderr)
        return 1
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests have failed; at most {MOST} are run again", file=sys.stderr)
        return 1
    for _ in range(TIMES):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments[1:], *failed]
        if subprocess.run(command, check=False).returncode:
            return 1
    for test in failed:
        print(UNSTABLE.format(TIMES, test), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
