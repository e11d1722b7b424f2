"""Fault injection: plans (plan.py) and the points at which they act (points.py)."""

VARIABLE = "STARLING_FAULTS"  # the environment variable with the plan of the processes of a server
