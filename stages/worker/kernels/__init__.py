"""The kernels: the forward pass of one step, compiled by Numba for this CPU.

A process that only computes imports compiled.py, buffer_sizes.py, parameter_block.py and the formats, and no numba.

formats/             one module per quantization format; packing, unpacking and products are generated from it
simd/                vector types and operations that emit LLVM IR
gemv.py, gemm.py     matrix products for one token and for several; amx_gemm.py the latter with AMX tiles
attention            attention over KV pages, with elementwise.py for norms and rotations
forward.py           a whole step in one jitted function
sampler              one token from a row of logits
build.py             has the entries compiled, in parallel (compile_entries.py), each as one module
                     (link_once.py of pipeline/native), into the kernel cache (stored_code.py)
compiled.py          loads and calls what is in the cache, without numba
"""
