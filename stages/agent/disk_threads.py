"""The threads in which an agent waits for disks, engines and drivers of GPUs, by purpose.

A disk that does not answer, such as one on a network, keeps a thread for each call.  These bounds leave the threads of
the event loop to look-ups of names, and those of one purpose to it: heartbeats are answered and leases renewed, and
engines whose files are on another disk start and end.

What only computes with bytes (checksums, decompression) runs in the threads of the event loop.
"""

from __future__ import annotations

from pipeline.threads import Threads

__all__ = ["ENGINES", "GPUS", "LOOKS", "MODELS", "PAGES", "PEERS", "SESSIONS", "STATE"]

STATE = Threads("state", 1)  # agent.json: one write at a time
LOOKS = Threads("looks", 2)  # what heartbeats report of files and of prefixes: one look at a time of each (look.py)
GPUS = Threads("gpus", 1)  # what heartbeats report of them: one look at a time
MODELS = Threads("models", 32)  # files of models and adapters: downloads, checks, evictions
PEERS = Threads("peers", 16)  # pieces that are read for other agents
ENGINES = Threads("engines", 32)  # homes and processes of engines, each of which makes one call at a time
PAGES = Threads("pages", 16)  # KV arenas, and calls to the processes that own them
SESSIONS = Threads("sessions", 8)  # calls to engines about sessions, whose files are on a disk
