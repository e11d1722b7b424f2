"""Connections between stages.

endpoint.py      frames over ZeroMQ: one `Link` or `Hub` per edge
liveness.py      heartbeats, incarnations, and when a peer counts as gone
poll_loop.py     the event loop of stages that poll
asyncio_loop.py  the same edges in an asyncio loop (gateway)
control.py       control sockets for commands; control_poll.py serves one in a poll loop
doorbell.py      the datagram socket that wakes a worker or the scheduler
tcp_transport.py the state of a TCP connection, and its abort
"""
