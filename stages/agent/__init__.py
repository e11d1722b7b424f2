"""The agent: models on one machine of a fleet.

stage.py       the process: start, end, what belongs to what
lease.py       its record in the coordination store, and how long it may serve
http_api.py    the calls of orchestrators
doors.py       TLS in front of the engines
models.py      which models are placed here
adapters.py    LoRA adapters of those models
memory_check.py  whether the host has memory for them
placement.py   one model: download, engine, restarts, end
heartbeat.py   what the agent reports
gpus.py        how much of the host's GPUs is used
held_prefixes.py  the pages that its engines hold, and how that changes
metrics.py     the same as Prometheus text
disk_threads.py  the threads that wait for disks, engines and drivers of GPUs
engines/       the programs that compute
downloads/     pieces of published models, from several sources at once
peers/         pieces that agents give each other
kv_pages/      KV pages that agents give each other
cache/         what has arrived: bounds, last use, eviction, adoption after a crash
"""
