"""What every stage is built from: messages, sockets, supervision, configuration, logs, metrics.

api/             what HTTP front ends share: fields and their checks, error responses, API keys, quotas, SSE
config/          the configuration: schema, file, environment, checks, paths
protocol/        the messages between stages, and the table of edges
ipc/             ZeroMQ endpoints, liveness, event loops, control sockets, the doorbell
runtime/         what every stage process does: run directory, status, parent death, timers
supervise/       the processes that start, watch and restart stages
observe/         logs, metrics, status records
fleet/           what agents and orchestrators share: records, bodies, the token
models/          model files, downloads, the table of model versions, the capacity check
faults/          fault plans and the points where they act
errors.py        every error, with its code and HTTP status
call_queue.py    calls that wait for one thread, with bounds
addresses.py     IP addresses of a host
files.py         atomic replacement and durable appends
record_file.py   checksummed records in files
eviction_order.py   LRU, LFU and FIFO orders
procfs.py        readers of /proc
threads.py       calls in threads that are waited for, and threads by purpose
plugin_objects.py   the classes of configured plugins
"""
