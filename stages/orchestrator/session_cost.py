"""Whether a session's turn is served where the session is, or by an agent to which the session moves for it.

    stay    the queue of its agent, which holds its KV pages
    move    the queue of the other agent, the calls of a move, and the session's pages: computed at the measured speed
            of that agent, or sent at the measured speed of the link as far as they can be, and the rest computed,
            whichever is expected to be faster

All of it is an estimate in seconds, as a score is (score.py), with the same weights: gamma for queues, beta for what
pages save, delta for transfers.  A session moves only for a gain of `least_gain_s` or more, and the same
queues never move it back.  Ties go to the agent whose id is first.  Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stages.orchestrator.score import Terms, Weights

EQUAL = Weights()
MOVE_S = 0.05  # of the calls of a move, each of which waits for a disk


class Place(NamedTuple):
    """An agent that could serve the turn."""

    agent_id: str
    queue_s: float  # of what is ahead
    prefill_s_per_byte: float
    bytes_per_s: float = 0.0  # of KV pages from the session's agent; 0: none are sent


class Size(NamedTuple):
    """Of a session."""

    text_bytes: int  # of its tokens, as prompts are counted
    page_bytes: int = 0  # of its KV pages that can be sent; 0: not known, or none are there
    sent_part: float = 1.0  # of all its pages, 0 to 1, that those are


def pages_s(place: Place, size: Size) -> float:
    """Until a session's pages are at another agent."""
    computing_s = size.text_bytes * place.prefill_s_per_byte
    if not size.page_bytes or not place.bytes_per_s:
        return computing_s
    return min(computing_s, size.page_bytes / place.bytes_per_s + (1 - size.sent_part) * computing_s)


def terms_of(place: Place, size: Size, *, is_home: bool) -> Terms:
    """The terms of an agent for a session's turn, without what the turn itself computes, wherever that is."""
    if is_home:
        return Terms(queue_s=place.queue_s)
    return Terms(kv_hit_s=-pages_s(place, size), queue_s=place.queue_s, transfer_s=MOVE_S)


def cheapest(home: Place, others: Iterable[Place], size: Size, least_gain_s: float, weights: Weights = EQUAL) -> str:
    """The agent that serves the turn: `home`, or another one if moving there gains enough."""
    ranked = [(terms_of(one, size, is_home=False).total(weights), one.agent_id) for one in others]
    if not ranked:
        return home.agent_id
    cost_s, agent_id = min(ranked)
    gain_s = terms_of(home, size, is_home=True).total(weights) - cost_s
    return agent_id if gain_s > 0 and gain_s >= least_gain_s else home.agent_id
