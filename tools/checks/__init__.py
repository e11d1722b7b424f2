"""Checks of the source and of the documentation: `python -m tools.checks`, part of `make check`.

Each module is one check. Its `problems(root)` yields one line per violation, with the file, the line and the remedy.
No check runs the project's code or writes a file.
"""
