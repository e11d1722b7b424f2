"""Invalid submissions are refused with the field."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pipeline.protocol.messages import Sampling
from stages.scheduler.policy.admission import Limits, check_frame, check_limits

from .builders import sequence
from .peers import submission


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_ids": tuple(range(40))}, "stop_token_ids"),
        ({"sampling": Sampling(logit_bias=tuple((i, 1.0) for i in range(301)))}, "logit_bias"),
        ({"sampling": Sampling(logprobs=21)}, "logprobs"),
        ({"sampling": Sampling(order=("mask", "mask"))}, "order"),
        ({"sampling": Sampling(order=("magic",))}, "order"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": b"abc"}, "prompt"),
        ({"forced": b"abc"}, "forced"),
    ],
)
def test_malformed_submissions_name_the_field(fields, param):
    refusal = check_frame(replace(submission("a", [1], 5), **fields))
    assert refusal is not None
    assert (refusal.code, refusal.param) == ("INVALID_REQUEST", param)
    assert check_frame(submission("a", [1], 5)) is None


def test_ids_outside_the_vocabulary_never_reach_a_row():
    limits = Limits(vocab_size=100)
    s = sequence()
    assert check_limits(s, limits) is None
    s.stop_ids = frozenset({100})
    assert "stop_token_ids" in str(check_limits(s, limits))
    s.stop_ids = frozenset()
    s.sampling = Sampling(logit_bias=((-1, 1.0),))
    assert "logit_bias" in str(check_limits(s, limits))
