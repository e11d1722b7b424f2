"""The orchestrator: one address for a fleet of agents. Pure modules, and stage.py with the I/O.

interfaces.py   NodeManager and RequestRouter, and what they exchange
registry.py     the agents, and how they are
score.py        the estimate by which agents are compared
rates.py        the measured speeds behind it
prefixes.py     which prompts each engine was sent
router.py       the choice of an agent
decisions.py    why each choice was made
"""
