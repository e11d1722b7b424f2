"""Which test files a run needs, by their text: a file whose tests `-m` deselects all is not imported.

Most files have only slow tests or none. To import them all takes longer than many tests.
"""

from __future__ import annotations

import re
from pathlib import Path

_SLOW = re.compile(rb"\bmark\.slow\b")
_ALL_SLOW = re.compile(rb"^pytestmark = (?:pytest\.mark\.slow$|\[\s*pytest\.mark\.slow,)", re.MULTILINE)


def is_needed(path: Path, markers: str) -> bool:
    """Whether `-m markers` can select a test of the file at `path`. True when its text does not decide that.

    The marks of slow tests stand in the file itself: no other module applies them.
    """
    if not path.name.startswith("test_") or path.suffix != ".py":
        return True
    if markers == "slow":
        return _SLOW.search(path.read_bytes()) is not None
    if markers == "not slow":
        return _ALL_SLOW.search(path.read_bytes()) is None
    return True
