"""How long a step takes on more cores than this machine has."""
