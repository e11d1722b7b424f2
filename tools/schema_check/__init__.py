"""Structured output at scale: every answer of a running server to hundreds of JSON Schemas is validated.

corpus.py     the schemas: those of a folder, such as a checkout of JSONSchemaBench, or generated ones
generated.py  schemas of all features, by number
answers.py    what an answer says: valid, invalid, cut off, refused by name, ...
command.py    `python -m tools.schema_check`, `make schema-check`
"""
