"""Measures a fleet on one machine: what the orchestrator adds, how long a death pauses a stream, what routing is worth,
how long a cold start takes.

fleet_under_test.py  `starling fleet up` with a home of its own
stand_in.py          an agent and an engine that compute nothing
forwarding.py        the orchestrator in front of them, beside nginx
overhead.py          the warm path beside the bare engine, with a model
deaths.py            SIGKILL of agents, engines, hosts, orchestrators and the store under streams
hosts_under_test.py  agents on hosts of their own, in network namespaces
store_under_test.py  etcd or Redis
routing.py           the score beside other policies
cold_start.py        from a load to its first token, by where the model's bytes are
fan_out.py           several agents that want the same file at once
limited_store.py     nginx and a link with bounds for both
agent_under_test.py  agents with homes of their own
command.py           the command
"""
