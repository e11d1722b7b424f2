"""What takes most of an encoder's time, as machine code: byte-pair merges, and cuts into the tokens of a trie.

merge_words.py   the jitted function that merges the words of a text; needs numba
merge_long.py    its part for one long word
cut_words.py     the jitted function that cuts words into tokens; needs numba
pairs.py         the tables of pairs, as both read them
compile.py       a process that compiles them
compiled.py      loads them, and calls the first
word_cutter.py   calls the second
"""
