"""What every stage process does beside its work.

stage_runtime.py     readiness, heartbeats, status, signals
run_dir.py           sockets, records and locks of one server
arena_dir.py         the directory in /dev/shm, which another user cannot take
directory_lock.py    lifetime locks on the state, arena and spill directories
process.py           death with the parent, child signals, systemd notification
steady_clock.py      seconds since 1970 that no change of the system's clock moves
timer_coalescing.py  idle processes wake at the same moments
malloc_trim.py       free memory goes back to the system after a burst
huge_heap.py         the heap of a process that has started is in huge pages
"""
