"""`python -m tools.bench.loading` runs the command of `command.py`."""

from tools.bench.loading.command import run

run()
