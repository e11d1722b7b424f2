"""`python -m tools.schema_check`, see command.py."""

from tools.schema_check.command import main

main()
