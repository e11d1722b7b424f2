"""`python -m tools.bench.http` runs the command of `command.py`."""

from tools.bench.http.command import run

run()
