"""Checks of the machine and of this home, for `starling doctor`. They read; they change nothing."""
