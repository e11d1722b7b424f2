"""Checks that each alert of configs/prometheus fires when its fault occurs, and resolves: `make alerts`.

rules.py        the rules with all durations divided by a factor
prometheus.py   a Prometheus process that scrapes one server
faults.py       the faults of a server, and which alerts each of them makes due
watch.py        waits until alerts fire and resolve; an alert that no fault makes due is an error
__main__.py     starts the server and Prometheus, and injects one fault after the other
"""
