"""`python -m tools.bench`: figures of speed, Starling's and, where it is installed, llama.cpp's."""
