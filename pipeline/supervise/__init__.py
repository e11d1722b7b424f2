"""The processes that keep stages running.

base.py            what supervisors share: signals, children, log lines
supervisor.py      keeps one stage running
worker_pool.py     keeps a supervised worker group per model version
restart_count.py   how often a stage was restarted, also by earlier supervisors
restart_policy.py  when to restart, and when to give up
ancestors.py       processes above a supervisor whose death ends it
unix_listener.py  the Unix socket on which the gateway listens
listen_fd.py       the gateway's listening socket, kept over its restarts
cleanup.py         removes sockets, records and arenas after the last stage has exited
"""
