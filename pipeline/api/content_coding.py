"""Compressed request bodies (RFC 9110, section 8.4.1): gzip and deflate, bounded in size and in ratio.

A body may grow to `MAX_RATIO` times what was sent, and in any case to `FREE_BYTES`. JSON of text shrinks to a fifth to
a tenth: a body with a larger ratio was made to be expensive.
"""

from __future__ import annotations

import zlib

from pipeline.errors import InvalidRequest, StarlingError, TooLarge

MAX_RATIO = 32
FREE_BYTES = 64 << 10
CODINGS = ("gzip", "x-gzip", "deflate")
_AUTO = 32 + zlib.MAX_WBITS  # zlib's mode that accepts the headers of gzip and of zlib
_DEFLATED = 8  # CMF's low four bits in a zlib header; a raw deflate stream of some clients has none


def decompress(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Return `body` without its coding ("" or "identity": none).

    Raises `InvalidRequest` for damaged data or a ratio over `MAX_RATIO`, a 415 for an unknown coding, and `TooLarge`
    for more than `max_bytes`.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in CODINGS:
        raise StarlingError(
            "INVALID_REQUEST", f"Content-Encoding is {coding[:64]!r}; send gzip, deflate or no coding", status=415
        )
    is_raw = coding == "deflate" and bool(body) and body[0] & 0xF != _DEFLATED
    decoder = zlib.decompressobj(-zlib.MAX_WBITS if is_raw else _AUTO)
    allowed = max(FREE_BYTES, MAX_RATIO * len(body))
    try:
        plain = decoder.decompress(body, min(allowed, max_bytes) + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not valid {coding}: {error}") from None
    if len(plain) > max_bytes:
        raise TooLarge(f"the body is larger than {max_bytes} bytes (server.max_body_mb) without its coding; send less")
    if len(plain) > allowed:
        raise InvalidRequest(
            f"the body grows to more than {MAX_RATIO} times the {len(body)} bytes that were sent; send it without "
            "Content-Encoding"
        )
    if not decoder.eof or decoder.unused_data:
        raise InvalidRequest(f"the body is not one complete {coding} stream")
    return plain
