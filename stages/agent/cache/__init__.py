"""The models that have arrived on this machine, and the room they may take.

eviction.py      which of them must go (pure)
model_cache.py   the files: what is here, eviction, adoption after a crash
page_cache.py    whether a file is in memory
"""
