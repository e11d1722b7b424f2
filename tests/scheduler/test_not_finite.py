"""Samples whose logits are not finite: they end a request only where plain decoding would meet them, too."""

from __future__ import annotations

import pytest

from shm import step_ring as sh

from .peers import submission
from .world import World

NOT_FINITE = -1


def run(rejected: int = 0, accepted: int = 0) -> tuple[World, int]:
    """Verify draft tokens that differ now and then. Returns the world and the number of samples that are not finite.

    rejected: what samples behind a rejected draft token become, accepted: those behind an accepted one; 0: unchanged.
    """
    world = World(batch=4, period=7, speculate=8)
    worker, plain, changed = world.worker, world.worker.compute, 0
    worker.differs = 9

    def compute(number: int) -> None:
        nonlocal changed
        plain(number)
        slot = number % sh.SLOTS
        n = int(world.steps.slot_head[slot][sh.SLOT_ENTRIES])
        for row, start, _, samples, base, *_ in world.steps.entries[slot, :n].tolist():
            out = world.steps.out_token[slot]
            for i in range(samples - 1):
                is_accepted = out[base + i] == world.steps.tokens[row, start + 1 + i]
                value = accepted if is_accepted else rejected
                if value:
                    out[base + i + 1 : base + samples] = value
                    changed += 1
                if value or not is_accepted:
                    break

    worker.compute = compute  # type: ignore[method-assign]
    world.submit(submission("s", [*range(1, 30)] * 2, 120))
    world.run_until_idle()
    return world, changed


@pytest.mark.parametrize("value", [NOT_FINITE, sh.NO_MASK])
def test_samples_behind_a_rejected_draft_token_end_no_request(value: int) -> None:
    """They are computed from the rejected token, and plain decoding never computes them."""
    undisturbed, _ = run()
    world, changed = run(rejected=value)
    assert changed > 0, "no draft token was rejected"
    assert world.errors == {"s": ""}
    assert (world.tokens, world.ends) == (undisturbed.tokens, undisturbed.ends)


def test_a_sample_behind_accepted_draft_tokens_ends_its_request() -> None:
    undisturbed, _ = run()
    world, changed = run(accepted=NOT_FINITE)
    assert changed == 1
    assert world.errors == {"s": "INFERENCE"}
    tokens = world.tokens["s"]
    assert 0 < len(tokens) < 120
    assert tokens == undisturbed.tokens["s"][: len(tokens)]
