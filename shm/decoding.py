"""What msgspec's decoders raise for bytes that are not valid: besides its own errors, two of Python's.

A string that is not UTF-8 is a `UnicodeDecodeError`, and nesting beyond the interpreter's limit a `RecursionError`.
"""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
