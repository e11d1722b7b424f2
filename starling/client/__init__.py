"""A client of the server's public HTTP API, as the commands for people use it: addresses and streamed answers."""
