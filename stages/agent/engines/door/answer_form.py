"""What an answer may have besides the text of one choice, as its request says.

Another engine can go on from a text alone.  It would begin JSON that a schema describes anew, could not parse the
second half of a call, and has neither the log probabilities of what was delivered nor which choice to go on with.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.api.requests.generation_request import GenerationRequest


class AnswerForm(NamedTuple):
    """Of one request."""

    is_chat: bool
    n_choices: int = 1
    has_calls: bool = False  # of tools
    has_logprobs: bool = False
    n_top: int = 0  # most likely tokens at each place
    fixed_by: str = ""  # the field for which no other engine can go on from the text; "": one can


def form_of(request: GenerationRequest) -> AnswerForm:
    """The form of its answer."""
    fixed_by = ""
    if request.n > 1:
        fixed_by = "n"
    elif request.logprobs:
        fixed_by = "logprobs"
    elif request.tools:
        fixed_by = "tools"
    elif request.constraint:
        fixed_by = "response_format"
    return AnswerForm(
        request.messages is not None,
        request.n,
        bool(request.tools),
        request.logprobs,
        request.top_logprobs,
        fixed_by,
    )
