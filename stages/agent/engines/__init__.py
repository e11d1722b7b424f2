"""The programs that compute, each a child process with a model.

interface.py        what the agent asks of an engine
http_session.py     what is needed of an HTTP client
child.py            a process group with the end of its output
fence.py            the end of everything that an earlier engine has left
starling_engine.py  `starling up` with a home of its own
prometheus_text.py  numbers from an engine's metrics
"""
