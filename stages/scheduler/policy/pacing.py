"""Pacing: how many steps are published ahead, how often the scheduler is woken, and how long a step may take.

Three goals are balanced.  A published step cannot change any more, so a request that arrives waits for all published
steps.  Each wake-up of the scheduler or of kv costs about as much CPU time as a short step, which the worker loses
where all cores compute.  Running streams must not wait too long for their next token while a prompt is computed.
"""

from __future__ import annotations

from typing import NamedTuple

from shm.step_ring import SLOTS


class PacingPolicy(NamedTuple):
    """All pacing constants of one model. Units are in the names; `depth` fields count steps."""

    # Steps that are published and not acknowledged.
    depth: int = 2  # one step computes, the next one is ready behind it
    max_depth: int = SLOTS // 2 - 1  # of short steps, and of steps of draft sequences

    # Short steps follow each other while the steps ahead take less than this in all: so long a stream waits for the
    # next wake-up of the scheduler.  With more than `wake_streams` streams each wake-up sends more tokens, so the
    # time grows in proportion to the number of streams, up to `max_wake_s`.
    wake_s: float = 0.015
    wake_streams: int = 8
    max_wake_s: float = 0.040
    short_step_s: float = 0.010  # the step after a shorter one is published at once

    # The next step is published this long before the current one is expected to end: late enough to include what
    # has arrived meanwhile.  The lead doubles when the worker had to wait, and shrinks slowly (`LeadTime`).
    min_lead_s: float = 0.003
    max_lead_s: float = 0.1

    # `Commit` of a stream is sent this many positions after its page is full: pages of other streams fill
    # meanwhile, and kv is woken once for all of them.
    commit_delay_tokens: int = 16

    # The longest gap of running streams that prompt tokens may cause: this multiple of the longest one without
    # them, which is that of a step, or of short steps whose tokens are sent together. "Longest" is the 99th percentile
    # (`policy/spread.py`), of which `margin` is used. A step is predicted to take between `min_margin` and `margin` of
    # the bound for predicted times: where times vary more than that allows for, other programs cause the gaps, and the
    # prompt must advance.
    gap_factor: float = 3.0
    margin: float = 0.85
    min_margin: float = 0.5
    # The bound is longer while several prompts of the streams' own tenants wait, since a burst of them would keep the
    # machine busy for long: up to this multiple (docs/experiments.md, "First tokens of a burst").
    crowd_factor: float = 1.5
    # It is that long where one more prompt waits for every so many streams, and shorter in proportion for more streams.
    crowd_streams: float = 8.0
    # The prompt of a tenant that has received little gets more time, so that it is complete in one step.
    quiet_margin: float = 0.95
    quiet_us: float = 35_000.0
    # A step without running streams: the time that an arriving request may wait for it. Where it takes long without any
    # token, prompt tokens get a multiple of that time, up to `max_prefill_us`: weights are read once for all of them.
    prefill_us: float = 60_000.0
    prefill_factor: float = 3.0
    max_prefill_us: float = 500_000.0
    # Positions that a draft sequence catches up in one step: a request that arrives waits for them.
    draft_chunk_us: float = 10_000.0

    def stream_wait_s(self, streams: int) -> float:
        """How long `streams` streams may wait for their tokens while no request waits."""
        return min(self.max_wake_s, self.wake_s * max(1.0, streams / self.wake_streams))

    def may_follow(self, steps: int, expected_s: float, streams: int) -> bool:
        """Whether one more short step may follow `steps` steps that take `expected_s` seconds in all."""
        return steps < self.max_depth and expected_s < self.stream_wait_s(streams)

    def gap_bound_us(self, streams_us: float, crowd: float = 0.0) -> float:
        """The longest gap that prompt tokens may cause where streams alone have steps of `streams_us`.

        `crowd`: prompts that wait behind the first one, for each stream.

        Tokens of short steps reach a stream together, after `wake_s`. Where each token is sent alone, as beside
        constraints and on cores that models share, the bound is the same: 45 ms at least, and up to 67.5 for a crowd,
        though gaps were shorter.
        """
        factor = 1.0 + (self.crowd_factor - 1.0) * min(1.0, crowd * self.crowd_streams)
        return self.gap_factor * factor * max(1e6 * self.wake_s, streams_us)

    def prompt_budget_us(
        self, streams_us: float, alone: float, beside: float, crowd: float = 0.0
    ) -> tuple[float, float]:
        """Time for prompt tokens in a step whose streams take `streams_us`; `crowd`: as for `gap_bound_us`.

        `alone`, `beside`: 99th percentile of measured / predicted time of steps without prompt tokens and with them.
        Returns the usual time and the additional time for the prompt of a quiet tenant.
        """
        gap_us, longest_us = self.gap_bound_us(streams_us, crowd), self.gap_bound_us(streams_us * alone, crowd)
        usual_us = min(self.margin * gap_us, max(self.min_margin * gap_us, self.margin * longest_us / beside))
        return usual_us - streams_us, self.quiet_margin * gap_us - usual_us

    def prefill_budget_us(self, fixed_us: float) -> float:
        """Time for prompt tokens in a step without streams, whose fixed part takes `fixed_us`."""
        return max(self.prefill_us - fixed_us, min(self.prefill_factor * fixed_us, self.max_prefill_us))


class LeadTime:
    """Seconds before the expected end of a step at which the next one is published. Adapts to late publications."""

    DECAY = 0.99  # for each acknowledged step

    def __init__(self, pacing: PacingPolicy) -> None:
        self.seconds = pacing.min_lead_s
        self._pacing = pacing

    def record_step(self) -> None:
        """A step was acknowledged."""
        self.seconds = max(self._pacing.min_lead_s, self.DECAY * self.seconds)

    def record_late(self) -> None:
        """The worker was idle because the next step was published too late."""
        self.seconds = min(self._pacing.max_lead_s, 2 * self.seconds)
