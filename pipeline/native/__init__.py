"""Machine code of jitted functions: made in a process of its own, stored, and loaded where there is no compiler.

link_once.py      a jitted function and all that it calls become one object file; needs numba
lean_numba.py     Numba without the work that link_once.py does not need
object_file.py    stores object files, and loads stored ones
object_code.py    loads an object file into this process
"""
