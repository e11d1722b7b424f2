"""Launchers put a fleet's agents on machines. None of them is in the path of a request.

interface.py    what every launcher does
local.py        agents as processes of this machine
systemd.py      the agent of this host as a unit of systemd
kubernetes.py   agents as pods, by Helm and the chart in chart/
ray_cluster.py  agents on the nodes of a Ray cluster, each held by an actor
ray_actor.py    that actor
programs.py     calls of systemctl, helm and kubectl
select.py       the launcher of a name
"""
