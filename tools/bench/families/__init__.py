"""How fast each architecture is beside a llama graph of the same size, and whether its memory is the predicted one.

shapes.py has the random models, models.py writes them, speed.py compares rates, memory.py compares memory with
`starling models --plan`, command.py is the command: `python -m tools.bench.families speed|memory`.
"""
