"""The pages of one arena.

page_table.py     state, references and hash of every page; the eviction order
page_headers.py   the headers in the arena, the table's write-through
prefix_hash.py    page hashes: chained hashes of the tokens
page_pool.py      finding, restoring, evicting and expiring pages
page_source.py    interfaces of the places outside the arena
older_version.py  a source: the arena of an older version of the same file
token_rows.py     tokens of running sequences, from the step arena
arena.py          creating and adopting the arena
"""
