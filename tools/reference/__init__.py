"""NumPy twins of the forward pass: what the kernels are held against.

`float.py` computes in floats (tolerances against an independent engine), `exact.py` computes what
docs/numerics.md defines (the kernels equal it byte for byte).  Both read the GGUF itself and know nothing
of the layouts the kernels use.
"""
