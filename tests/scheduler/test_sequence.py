"""The phases of a sequence."""

from __future__ import annotations

import pytest

from stages.scheduler.core.sequence import IllegalTransitionError, Phase

from .builders import sequence


def test_only_legal_transitions():
    s = sequence()
    for phase in (Phase.PREFILLING, Phase.DECODING, Phase.PENDING, Phase.PREFILLING, Phase.FAILED):
        s.enter_phase(phase)
    for phase in Phase:
        with pytest.raises(IllegalTransitionError, match="failed ->"):
            s.enter_phase(phase)
    with pytest.raises(IllegalTransitionError):
        sequence().enter_phase(Phase.DECODING)
