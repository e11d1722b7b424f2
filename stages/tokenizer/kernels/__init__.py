"""Byte-pair merges of a text's words as machine code.

merge_words.py   the jitted function; needs numba
compile.py       a process that compiles it
compiled.py      loads and calls it
"""
