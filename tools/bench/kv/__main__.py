"""`python -m tools.bench.kv` runs the command of `command.py`."""

from tools.bench.kv.command import run

run()
