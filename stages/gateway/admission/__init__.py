"""From a valid request to one that can be started, and the reasons to reject it.

admit.py              the steps of admission, in order
prompts.py            prompts as token ids
lengths.py            checks against the context and the configured bounds
in_flight.py          counts of requests
drain.py              admission stopped by an operator
stage_health.py       the health of one stage, from its heartbeats
server_readiness.py   whether a model can take requests, and waiting for it
"""
