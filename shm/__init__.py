"""Shared memory: the layouts that processes map, and ordered access to them.

arena.py        mapped files with a checked header
pages.py        the KV arena: page headers and pages
prefix_hash.py  names of pages
sent_pages.py   pages on their way to another engine
step_ring.py    the step arena: ring of steps, rows of sequences
checkpoint.py   the pair of files that a model is loaded from
hyper.py        the hyper-parameters in its index
decoding.py     what decoders raise for invalid bytes
barrier.py      barriers between ranks
atomics.py      atomic operations, futexes and clocks for jitted code
words.py        ordered access to 64-bit words from plain Python
"""
