"""The coordination store: small values that the processes of a fleet agree on.

interface.py     keys, revisions, transactions, leases, watches: what every store does
memory.py        in one process, for tests and for a fleet of one process
sqlite_store.py  the processes of one machine, without a server; its watchers wait for file_changes.py
etcd_store.py    processes on several machines, on etcd
redis_store.py   likewise, on Redis; its script in redis_script.py, what a client has seen of leases in redis_leases.py
election.py      at most one leader, on any store
"""
