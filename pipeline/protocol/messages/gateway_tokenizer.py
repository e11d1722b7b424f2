"""Frames between gateway and tokenizer: texts, token ids, and what a model's tokenizer has."""

from __future__ import annotations

from typing import Any

from pipeline.protocol.messages.frame import Frame, Heartbeat, Hello


class Encode(Frame, tag="e"):
    """Text to token ids."""

    id: str
    model: str
    text: str
    parse_special: bool = False  # encode special tokens that are written out in the text
    add_bos: bool = True  # if the model asks for one
    offsets: bool = False
    token_limit: int = 0  # above it the answer has only the token count; 0: no limit
    request: str = ""  # id of the request, for log lines
    suffix: str = ""  # the prompt asks for what stands between `text` and this; for models that can
    tenant: str = ""  # for log lines, and the bounds of the queue of long texts; "": of none
    session: str = ""  # likewise; "": the request has none


class Render(Frame, tag="r"):
    """Chat messages to text by the model's template, then to token ids (special tokens parsed)."""

    id: str
    model: str
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    template_vars: dict[str, Any] = {}
    token_limit: int = 0  # as in Encode
    now: str = ""  # what `strftime_now` shows, ISO 8601; "": the tokenizer's clock
    request: str = ""  # as in Encode
    documents: list[dict[str, Any]] | None = None
    continue_final_message: bool = False  # the prompt ends where the content of the last message ends
    tenant: str = ""  # as in Encode
    session: str = ""  # as in Encode


class Detokenize(Frame, tag="d"):
    """Token ids to text."""

    id: str
    model: str
    tokens: tuple[int, ...]
    skip_special: bool = False
    request: str = ""  # as in Encode
    tenant: str = ""  # as in Encode
    session: str = ""  # as in Encode


class CancelText(Frame, tag="C"):
    """The reply to an `Encode`, `Render` or `Detokenize` is no longer wanted. Without an answer.

    A late one, or of an unknown id, means nothing: the reply has been sent, and the gateway drops it.
    """

    id: str


class Describe(Frame, tag="m"):
    """Ask for a model's properties and its vocabulary. Answered by `Described`."""

    id: str
    model: str
    known: tuple[str, ...] = ()  # digests of tokenizers that the gateway has cached: their pieces are not sent again


class Encoded(Frame, tag="E"):
    """Answer to `Encode` and `Render`."""

    id: str
    tokens: tuple[int, ...]
    offsets: bytes = b""  # u32 little-endian: begin and end of each token in the UTF-8 text
    too_many: int = 0  # number of tokens, when above `token_limit`; `tokens` is then empty
    is_exact: bool = False  # False: `too_many` is only a lower bound, because encoding stopped early


class Detokenized(Frame, tag="D"):
    """Answer to `Detokenize`."""

    id: str
    text: str


class Described(Frame, tag="M"):
    """Answer to `Describe`."""

    id: str
    model: str
    digest: str
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    chat: bool  # the model has a chat template
    architecture: str = ""
    parameters: int = 0
    created: int = 0
    tokenizer: str = ""  # digest of vocabulary, merges, special ids and template
    pieces: bytes = b""  # the bytes of every token, concatenated
    piece_ends: bytes = b""  # u32 little-endian: end of each token's bytes in `pieces`
    control: bytes = b""  # i32 little-endian: ids of control tokens, which have no text
    tool_format: str = ""  # how the model writes tool calls; "": its chat template has no place for tools
    pooling: str = ""  # of embeddings: one of POOLINGS; "": the file does not say
    width: int = 0  # values of an embedding
    end_id: int = -1  # token that ends a text to be embedded; -1: none
    generates: bool = True  # it generates text; False: it has embeddings alone
    fim_ends: tuple[int, ...] = ()  # tokens that end a text between a prompt and a `suffix`
    reasoning: tuple[str, ...] = ()  # marks before and after the model's reasoning; empty: it has none
    thinking_switches: tuple[str, ...] = ()  # variables by which its chat template turns reasoning on and off
    pair_separator: tuple[int, ...] = ()  # with pooling "rank": tokens between the two texts of a pair
    quantization: str = ""  # format of most bytes of the weights; "": not known
    kv_shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # layers, KV heads, head dim, window (0: all positions)
    kv_windowed: int = 0  # layers with that window where others have none; 0: all layers have it, or none
    revision: str = ""  # `Index.revision`
    kv_revision: int = 0  # `Hyper.kv_revision`: the part of it that changes the tokens after the same prompt ids


class TokenizerFailed(Frame, tag="X"):
    """Error answer. `code` and `param` as in pipeline/errors.py."""

    id: str
    code: str
    message: str
    param: str = ""


GatewayToTokenizer = Hello | Heartbeat | Encode | Render | Detokenize | CancelText | Describe
TokenizerToGateway = Hello | Heartbeat | Encoded | Detokenized | Described | TokenizerFailed
