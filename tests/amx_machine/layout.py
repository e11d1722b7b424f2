"""Memory that the handler of traps shares with Python: the state of a process, the log of all processes, and reasons.

    state    private to a process: whether it may use tiles, where the log is, and the tiles of its threads
    log      one file, mapped by all processes: for each thread its instructions by kind, and what it was ended for

A thread finds its state by a key of libc (`pthread_getspecific`): Linux gives the number of a thread that has ended to
another one, whose tiles are not configured.  A forked process has a copy of the state; its thread has another number
than the state that it finds, so its tiles are not configured either, as on Linux.
"""

from __future__ import annotations

# Instructions, in the order of their counters.
INSTRUCTIONS = (
    "ldtilecfg",
    "sttilecfg",
    "tilerelease",
    "tileloadd",
    "tileloaddt1",
    "tilestored",
    "tilezero",
    "tdpbssd",
    "tdpbsud",
    "tdpbusd",
    "tdpbuud",
)
LDTILECFG, STTILECFG, TILERELEASE, TILELOADD, TILELOADDT1, TILESTORED, TILEZERO, TDPBSSD, TDPBSUD, TDPBUSD, TDPBUUD = (
    range(len(INSTRUCTIONS))
)

# Why a thread is ended: number, signal and what is wrong. #UD and #NM end a process by SIGILL, #GP by SIGSEGV.
REASONS = (
    ("SIGILL", "not an AMX instruction"),  # an instruction that neither this CPU nor this emulation has
    ("SIGILL", "this process has not asked Linux for tiles"),
    ("SIGILL", "an encoding that the instruction does not have"),
    ("SIGILL", "the tiles are not configured"),
    ("SIGILL", "a tile is not configured"),
    ("SIGILL", "a row of a tile is not of whole lanes"),
    ("SIGILL", "operands of a product are one tile"),
    ("SIGILL", "shapes of a product's tiles do not match"),
    ("SIGSEGV", "a configuration of an unknown palette"),
    ("SIGSEGV", "a configuration with reserved bytes"),
    ("SIGSEGV", "a configuration with too long or too many rows"),
    ("SIGSEGV", "a configuration with rows or bytes alone"),
    ("SIGILL", "more threads than this emulation counts"),
)
(
    UNKNOWN,
    NOT_PERMITTED,
    ENCODING,
    NOT_CONFIGURED,
    NO_TILE,
    ODD_ROW,
    ONE_TILE,
    SHAPES,
    PALETTE,
    RESERVED,
    LARGE,
    HALF_TILE,
    THREADS_FULL,
) = range(len(REASONS))
FIRST_GENERAL_PROTECTION, LAST_GENERAL_PROTECTION = PALETTE, HALF_TILE

# State: offsets in bytes.
IS_PERMITTED, LOG_AT, MESSAGES_AT, KEY, THREADS_AT = 0, 8, 16, 24, 64
THREADS = 32
KEYS = 32  # of libc that a thread has room for from its start: a value of another one may be allocated
THREAD_ID, ROW_AT, CONFIGURATION, TILES = 0, 8, 64, 128  # of a thread
TILE_BYTES, N_TILES = 1024, 8  # a tile: 16 rows of 64 bytes
THREAD_BYTES = TILES + N_TILES * TILE_BYTES
STATE_BYTES = THREADS_AT + THREADS * THREAD_BYTES

# Messages: the text for each reason, of a fixed length.
MESSAGE_BYTES = 96

# Log: a row of int64 for each thread.
ROWS, ROW_BYTES = 512, 256
ROW_THREAD, ROW_PROCESS, ROW_REASON, ROW_ADDRESS, ROW_CODE, ROW_COUNTERS = 0, 8, 16, 24, 32, 64
LOG_BYTES = ROWS * ROW_BYTES

STATE_CALL = -1  # instead of a signal's number: the second argument is the address of the state

HANDLER = "amx_machine_handler"  # its name in the object file
