"""The benchmark of the kernels: Starling and llama.cpp in processes on this machine, without servers."""
