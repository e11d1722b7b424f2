"""`python -m tools.bench`: figures of speed, side by side with llama.cpp where its wheel is installed."""
