"""Measures a fleet on one machine: what the orchestrator adds, how long a death pauses a stream, what routing is worth.

fleet_under_test.py  `starling fleet up` with a home of its own
stand_in.py          an agent and an engine that compute nothing
forwarding.py        the orchestrator in front of them, beside nginx
overhead.py          the warm path beside the bare engine, with a model
deaths.py            SIGKILL of agents, engines and orchestrators under streams
routing.py           the score beside other policies
command.py           the command
"""
