"""Pieces that agents give each other, so that a file which several of them want leaves the blob store about once.

announcements.py   in the coordination store: which agent holds or downloads which file
holdings.py        what this agent can give: complete files and running downloads, each piece verified before it is sent
http_api.py        GET /pieces/...: bounded requests and bandwidth
client.py          one other agent as a source of pieces
sharing.py         the other agents of one download: who has what, and who reads which piece from the store
"""
