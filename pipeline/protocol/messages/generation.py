"""What a request asks of a generation: parts of frames, and of what the gateway stores of a request."""

from __future__ import annotations

from pipeline.protocol.messages.frame import Frame

DRY_BREAKERS = ("\n", ":", '"', "*")


class Sampling(Frame):
    """Parameters of one sequence, validated by the gateway; neutral values switch a step off."""

    seed: int = 0  # u64, drawn by the gateway when the client gave none
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int = -1  # -1: none; n: the sampled token's and the n highest (n <= 20)
    min_tokens: int = 0  # stop tokens are masked while fewer tokens have been sampled
    ignore_eos: bool = False
    order: tuple[str, ...] = ()  # empty: the default order, see stages/worker/kernels/sampler.py
    logit_bias: tuple[tuple[int, float], ...] = ()  # at most 300
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # tokens before the next one; -1: all
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS  # for the gateway, see `Submit.breakers`
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


class ReasoningPrefix(Frame):
    """The reasoning that may stand before an answer, between two marks; ids are those of control tokens, else -1."""

    begin: str
    end: str
    begin_id: int = -1
    end_id: int = -1
    is_open: bool = False  # the prompt ends in reasoning; False: the output may begin with the first mark


class Constraint(Frame):
    """What the whole output of a sequence must match; the end token is sampled only where it does.

    `kind` is one of CONSTRAINT_KINDS.  `field` is the client's field that it came from, for error messages.
    """

    kind: str
    text: str  # json_schema: JSON; choice: a JSON array of strings; the others: in their own language
    field: str = ""
    after: ReasoningPrefix | None = None  # the output may begin with reasoning, which need not match


# Of all positions, of the last one, of the first one; "rank": the score that the model makes of the first one.
POOLINGS = ("mean", "last", "cls", "rank")
CONSTRAINT_KINDS = ("json_schema", "regex", "choice", "lark", "gbnf")
