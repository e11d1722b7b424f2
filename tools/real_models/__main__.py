"""`python -m tools.real_models`."""

from tools.real_models.command import main

main()
