"""Fault injection: plans (plan.py) and the points at which they act (points.py)."""

VARIABLE = "STARLING_FAULTS"  # the environment variable with the plan of the processes of a server
# Kinds of state files, and their operations besides writing.
STATE_FILES = {
    "spill": ("read", "open"),
    "saved": ("read", "open"),
    "sessions": ("read", "open", "sync", "rename", "unlink"),
    "journal": ("read", "open", "sync", "rename"),
    "quotas": ("read", "open", "sync"),
    "logs": ("open", "rename", "unlink"),
    "locks": ("open",),
    "keys": ("read", "open"),
}
