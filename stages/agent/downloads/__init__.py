"""Downloads of published models, in verified pieces of 8 MiB.

queue.py         which downloads run: single flight, at most so many at once, cancelled when no caller wants them
model.py         one model: index, room, pieces, placement
transfer.py      the pieces of one `.bin`: which, from where, how many at once
pieces.py        state of each piece
sources.py       where pieces come from, and how to choose
concurrency.py   how many requests at once
bandwidth.py     bytes per second
part_file.py     the unfinished file
"""
