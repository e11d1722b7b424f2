"""The configuration. It is read in this order:

file.py        a YAML or TOML file as plain values
env.py         overrides from the environment
check.py       types and bounds of the schema; every problem is reported at once
rules.py       combinations that are impossible
load.py        the four steps above; returns a frozen `Config`
schema.py      every key with its type, bounds and default
addresses.py   what the address of an edge may be
paths.py       directories that follow from a configuration
"""
