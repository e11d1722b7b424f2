"""The programs that compute, each a child process with a model.

interface.py        what the agent asks of an engine
http_session.py     what is needed of an HTTP client
child.py            a process group with the end of its output
fence.py            the end of everything that an earlier engine has left
starling_engine.py  `starling up` with a home of its own
external_engine.py  an engine of other makers, behind a door of the agent
dialect.py          what differs between them
llama_server.py     llama.cpp's server
vllm.py             `vllm serve`
door/               the HTTP address of such an engine
local_model.py      its model: files that are on this host
launch.py           limits for its process
log_file.py         its output
prometheus_text.py  numbers from an engine's metrics
"""
