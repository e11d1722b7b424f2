"""Downloads of published models, in verified pieces of 8 MiB.

queue.py         which downloads run: single flight, at most so many at once, cancelled when no caller wants them
model.py         one model: index, room, pieces, placement
transfer.py      the pieces of one `.bin`: which, from where, how many at once
pieces.py        state of each piece
sources.py       where pieces come from, and how to choose
signed_store.py  a store behind URLs that an orchestrator signs, for an agent without credentials
concurrency.py   how many requests at once
bandwidth.py     bytes per second
part_file.py     the unfinished file
arriving.py      the unfinished file, shown to an engine that computes layers as they arrive
remaining.py     how long a download will take
"""
