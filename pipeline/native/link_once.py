"""How an entry becomes an object file: all its functions are linked, optimized and turned into machine code once.

    install()                            in a process that only compiles entries, before the first one
    entry_object(function, n, options)   an entry's object code

Numba's own libraries serve a process that calls what it compiles: each jitted function is optimized and becomes machine
code as soon as it is compiled, and again in each of its callers, into which it has been copied.  Here only the entry
is called, so the libraries of its callees wait, unoptimized, until the entry links them.  LLVM then sees the same
functions with the same attributes.

Work that only a process which calls its functions needs is left out, and so is repeated work (lean_numba.py has the
larger part), with the same object code.

Uses names of numba.core that are not part of Numba's interface; the tests fail if they change.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from numba import njit, types
from numba.core import caching, codegen, ir, registry
from numba.core.targetconfig import TargetConfig
from numba.core.types.functions import BaseFunction

from pipeline.native import lean_numba

_UNWRAPPED = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # Python calls none of them


class _Waiting(codegen.JITCodeLibrary):
    """The LLVM module of one function, and the libraries of those that it calls."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Add nothing more. Neither links nor optimizes."""
        self._raise_if_finalized()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """0: there is no machine code."""
        return 0

    def emit_entry(self) -> bytes:
        """The object code of this function and of all that it calls. Once only: it changes the module."""
        for library in self._callers_first():
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._optimize_final_module()
        self._final_module.verify()
        return bytes(self._codegen._tm.emit_object(self._final_module))

    def _callers_first(self) -> Iterator[Any]:
        """The libraries of all callees, each after those that call it: LLVM links only functions that are missing."""
        finished: dict[int, Any] = {}

        def visit(library: Any) -> None:
            for callee in library._linking_libraries:
                if id(callee) not in finished:
                    visit(callee)
            finished[id(library)] = library

        visit(self)
        del finished[id(self)]
        return reversed(finished.values())


def install() -> None:
    """From now on, jitted functions are compiled for `entry_object` alone: this process can call none of them."""
    lean_numba.install()
    generator = registry.cpu_target.target_context.codegen()
    generator._library_class = _Waiting
    generator.set_env = lambda name, environment: None  # a variable of machine code, of which there is none
    for wrapping in ("create_cpython_wrapper", "create_cfunc_wrapper"):  # each function would get two that Python calls
        setattr(registry.cpu_target.target_context, wrapping, lambda *arguments, **options: None)
    # A function that is merged into its caller is copied first, and each block with all variables and positions.
    ir.Scope.__deepcopy__ = ir.Loc.__deepcopy__ = lambda self, memo: self
    functions: Any = BaseFunction
    functions.get_call_type = _remembering(BaseFunction.get_call_type)
    ir.Inst._rec_list_vars = _variables
    TargetConfig.values = _options
    # Numba's own cache holds machine code.
    caching.FunctionCache.load_overload = lambda self, signature, context: None
    caching.FunctionCache.save_overload = lambda self, signature, data: None


def _remembering(resolve: Any) -> Any:
    """`BaseFunction.get_call_type` that tries an operator's many overloads once for each combination of types."""
    operators = {one for one in vars(operator).values() if callable(one)}
    known: dict[Any, tuple[Any, Any]] = {}

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        if kws or self.typing_key not in operators:
            return resolve(self, context, args, kws)
        key = self.key, args
        if key not in known:
            signature = resolve(self, context, args, kws)
            known[key] = signature, self.get_impl_key(signature)
        signature, implementation = known[key]
        self._impl_keys[signature.args] = implementation
        return signature

    return get_call_type


_CONTAINERS = (list, tuple), dict
_is_part: dict[type, Any] = {}  # by class of an instruction's part: as what it is searched for variables; None: not


def _variables(instruction: Any, part: Any) -> list[Any]:
    """`ir.Inst._rec_list_vars`, which finds out the type of each part of each instruction by up to five questions."""
    kind = type(part)
    if kind not in _is_part:
        _is_part[kind] = next((one for one in (ir.Var, ir.Inst, *_CONTAINERS) if issubclass(kind, one)), None)
    searched_as = _is_part[kind]
    if searched_as is None:
        return []
    if searched_as is ir.Var:
        return [part]
    if searched_as is ir.Inst:
        return part.list_vars()
    found = []
    for one in part.values() if searched_as is dict else part:
        if _is_part.get(type(one), True):  # most are numbers, names and positions in the source
            found += _variables(instruction, one)
    return found


def _options(config: Any) -> dict[str, Any]:
    """`TargetConfig.values`, which calls a property for each of dozens of options to compare two configurations."""
    return {name: option.default for name, option in config.options.items()} | config._values


def entry_object(function: Any, n: int, options: Mapping[str, Any]) -> tuple[bytes, str]:
    """Compile a jitted function for n int64 arguments; returns its object code, and its name in that.

    `options`: of numba.

    Raises `TypeError` when it returns anything but an int64 or nothing.
    """
    signature = (types.int64,) * n
    entry = njit(**options, **_UNWRAPPED)(function.py_func)
    entry.compile(signature)
    result = entry.overloads[signature]
    if result.signature.return_type not in (types.int64, types.none):
        raise TypeError(f"{function.__name__} returns {result.signature.return_type}, not int64 or nothing")
    return result.library.emit_entry(), result.fndesc.llvm_func_name
