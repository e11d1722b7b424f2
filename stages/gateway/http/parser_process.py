"""A process that parses large request bodies for the gateway.

JSON decoding holds the interpreter lock: in the gateway it would stop every stream.  Frames go through stdin and
stdout; the peer is the gateway that started this process.

    in   two lengths (`HEAD`), a pickle of the fields of a `Body` but `data`, and the data
    out  a length (`LENGTH`), and a pickle of (True, result), or of (False, (code, message, param, status, names)) of
         a `StarlingError`

Token ids of prompts are sent as arrays, which the gateway reads in a fraction of the time that tuples take.  The
process ends with the gateway, or when stdin is closed.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from array import array
from typing import Any, BinaryIO

import msgspec

from pipeline.api.requests.embeddings import EmbeddingRequest
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.api.requests.tokenize import DetokenizeRequest
from pipeline.errors import InternalError, StarlingError
from pipeline.runtime import process
from pipeline.runtime.malloc_trim import trim
from stages.gateway.endpoints.body_readers import Body, read_request_body

HEAD = struct.Struct("<II")
LENGTH = struct.Struct("<I")
NICENESS = 10  # a large body must not take a core from the gateway or a worker
TRIM_BYTES = 1 << 20  # after a body of this size free memory is returned


def pack_ids(result: Any) -> Any:
    """Return `result` with the token ids of prompts as arrays of int32."""
    if isinstance(result, GenerationRequest):
        prompts: list[Any] = [p if isinstance(p, str) else array("i", p) for p in result.prompts]
        return msgspec.structs.replace(result, prompts=prompts)
    if isinstance(result, EmbeddingRequest):
        inputs: list[Any] = [p if isinstance(p, str) else array("i", p) for p in result.inputs]
        return msgspec.structs.replace(result, inputs=inputs)
    if isinstance(result, DetokenizeRequest):
        packed: Any = array("i", result.tokens)
        return msgspec.structs.replace(result, tokens=packed)
    return result


def answer(body: Body) -> tuple[bool, Any]:
    """Return the frame that answers a body."""
    try:
        return True, pack_ids(read_request_body(body))
    except StarlingError as rejected:
        error = rejected
    except MemoryError:
        error = InternalError("there is not enough memory to parse the body")
    return False, (error.code, error.message, error.param, error.status, tuple(error.names))


def serve(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Answer bodies until `incoming` is closed."""
    while len(head := incoming.read(HEAD.size)) == HEAD.size:
        n_fields, n_data = HEAD.unpack(head)
        fields = pickle.loads(incoming.read(n_fields))
        data = incoming.read(n_data)
        reply = pickle.dumps(answer(Body(data, *fields)), pickle.HIGHEST_PROTOCOL)
        outgoing.write(LENGTH.pack(len(reply)) + reply)
        outgoing.flush()
        if len(data) > TRIM_BYTES:
            del data, reply
            trim()


def main() -> None:
    """Serve the gateway, which started this process with its own pid as the argument."""
    process.die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the gateway drains first, and closes stdin
    os.nice(NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
