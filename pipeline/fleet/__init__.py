"""What agents and orchestrators share.

records.py      what an agent writes into the coordination store
bodies.py       the bodies of the agent's HTTP API
model_states.py  groups of the states of models in them
token.py        the secret that both sides present
peer_tls.py     TLS with certificates on both sides, which replaces the secret
denied_list.py  certificates that are refused
"""
