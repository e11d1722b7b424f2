"""The reference implementation of the forward pass in NumPy, which the kernels are tested against.

`float_forward.py` computes in floats (compared with an independent engine, within a tolerance), `exact_forward.py`
computes what docs/numerics.md defines (the kernels equal it byte for byte).  Both read the GGUF file itself and are
independent of checkpoints and their layout.
"""
