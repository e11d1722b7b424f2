"""Numba's compiler without the work whose result nothing here needs: the same machine code in less time.

    install()      in a process that only compiles entries (link_once.py), before the first one

Numba is written for any Python function: with `try` and `with`, arrays, containers, reference counts, generators and
debug information.  Jitted functions of this project have numbers, tuples of these, and vectors in registers.  For each
function, instruction or call, Numba nevertheless opens contexts for errors, warnings and events, reads its
configuration, searches registries, and computes lifetimes that only reference counts and generators need.

A function that needs an omitted pass does not compile.  Uses names of numba.core that are not part of Numba's
interface; `install` and the tests fail if they change.
"""

from __future__ import annotations

import sys
import types as python_types
from typing import Any

from numba.core import (
    base,
    byteflow,
    cgutils,
    compiler,
    compiler_machinery,
    config,
    errors,
    interpreter,
    ir,
    lowering,
    postproc,
    ssa,
    transforms,
    typed_passes,
    typeinfer,
    types,
    untyped_passes,
)
from numba.core.typing import context as typing_context

# Passes for what no jitted function here has: `with`, closures, raised exceptions, literals that select an overload,
# loops over tuples of several types, expressions of arrays; and those that only print or collect diagnostics.
_OMITTED = {
    untyped_passes.WithLifting,
    untyped_passes.InlineClosureLikes,
    untyped_passes.RewriteDynamicRaises,
    untyped_passes.MakeFunctionToJitFunction,
    untyped_passes.FindLiterallyCalls,
    untyped_passes.LiteralUnroll,
    untyped_passes.LiteralPropagationSubPipelinePass,
    typed_passes.InlineOverloads,
    typed_passes.NopythonRewrites,
    typed_passes.NoPythonSupportedFeatureValidation,
    typed_passes.AnnotateTypes,
    typed_passes.DumpParforDiagnostics,
}


def install() -> None:
    """Change Numba in this process. Once. Raises `AttributeError` if Numba has no such name."""
    _wrap(compiler.DefaultPassBuilder, "define_nopython_pipeline", _without_omitted, staticmethod)
    _replace(compiler_machinery.PassManager, "_runPass", _run_pass)
    _wrap(postproc.PostProcessor, "run", _with_lifetimes_if_needed)
    for module in (errors, lowering, typeinfer):
        _replace(module, "new_error_context", _ErrorContext)
    for module in (byteflow, interpreter, ssa, typeinfer):
        _replace(module, "_logger", _Silent())
    _wrap(byteflow.Flow, "_run_handle_exception", _in_functions_without_handlers)
    _replace(typeinfer.ConstraintNetwork, "propagate", _propagate)
    _replace(base, "_has_loc", _has_loc)
    _wrap(base.BaseContext, "refresh", _when_modules_were_imported)
    _wrap(typing_context.BaseContext, "refresh", _when_modules_were_imported)
    _replace(config, "reload_config", lambda: None)  # each function would read the environment again
    _replace(lowering.Lower, "alloca_lltype", _alloca)
    for name in ("incref", "decref"):
        _wrap(lowering.Lower, name, _of_counted)
    _replace(ir.Var, "__eq__", _is_same_variable)


def _replace(owner: Any, name: str, new: Any) -> None:
    getattr(owner, name)
    setattr(owner, name, new)


def _wrap(owner: Any, name: str, wrapper: Any, kind: Any = lambda function: function) -> None:
    setattr(owner, name, kind(wrapper(getattr(owner, name))))


def _without_omitted(define: Any) -> Any:
    """`DefaultPassBuilder.define_nopython_pipeline` without _OMITTED; one pass manager for all functions."""
    known: dict[str, Any] = {}

    def define_nopython_pipeline(state: Any, name: str = "nopython") -> Any:
        if name not in known:
            manager = define(state, name)
            manager.passes = [one for one in manager.passes if one[0] not in _OMITTED]
            known[name] = manager
        return known[name]

    return define_nopython_pipeline


def _run_pass(self: Any, index: int, one: Any, state: Any) -> None:
    """`PassManager._runPass` without events, timers, checks and prints."""
    one.analysis = self._analysis
    one.run_initialization(state)
    one.run_pass(state)
    one.run_finalizer(state)


def _with_lifetimes_if_needed(run: Any) -> Any:
    """`PostProcessor.run`, which computes the lifetime of variables after most passes; used by generators, or to emit
    their deletions."""

    def run_if_needed(self: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
        if emit_dels or self.func_ir.is_generator:
            run(self, emit_dels, extend_lifetimes)
        else:
            self.func_ir.blocks = transforms.canonicalize_cfg(self.func_ir.blocks)
            self.func_ir.generator_info = None

    return run_if_needed


class _ErrorContext:
    """`errors.new_error_context`, which is a generator; entered for each instruction and each call."""

    __slots__ = ("_arguments",)

    def __init__(self, text: str, *arguments: Any, **named: Any) -> None:
        self._arguments = text, arguments, named

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, errors.NumbaError):
            text, arguments, named = self._arguments
            error.add_context(text.format(*arguments, **named) if arguments or named else text)


class _Silent:
    """A logger without listeners."""

    def debug(self, *arguments: Any, **options: Any) -> None:
        """Log nothing."""


def _in_functions_without_handlers(run: Any) -> Any:
    """`Flow._run_handle_exception`, which looks for the handler of each instruction."""

    def run_handle_exception(self: Any, runner: Any, state: Any) -> Any:
        if self._bytecode.exception_entries:
            return run(self, runner, state)
        state.advance_pc()
        return None

    return run_handle_exception


def _propagate(self: Any, inferrer: Any) -> list[Any]:
    """`ConstraintNetwork.propagate`, which enters a context of warnings for each constraint in each round.

    Calls whose arguments have the types of the last round are not resolved again.
    """
    found: list[Any] = []
    for constraint in self.constraints:
        used = _used_types(constraint, inferrer.typevars)
        if used and used == getattr(constraint, "resolved_with", None):
            continue
        try:
            constraint(inferrer)
        except typeinfer.ForceLiteralArg as error:
            found.append(error)
            continue
        except typeinfer.TypingError as error:
            new = typeinfer.TypingError(str(error), loc=constraint.loc, highlighting=False)
            found.append(typeinfer.utils.chain_exception(new, error))
            continue
        if used and constraint.signature is not None and constraint.signature.return_type.is_precise():
            constraint.resolved_with = used
    return found


def _used_types(constraint: Any, typevars: Any) -> tuple[Any, ...]:
    """The types that the signature of a call depends on: of the arguments and the function. Empty for all else."""
    kind = type(constraint)
    is_operator = kind is typeinfer.IntrinsicCallConstraint
    if not (is_operator or kind is typeinfer.CallConstraint) or constraint.kws or constraint.vararg is not None:
        return ()
    names = [one.name for one in constraint.args]
    used = tuple(typevars[name].type for name in (names if is_operator else [*names, constraint.func]))
    return () if isinstance(used[-1], types.RecursiveCall) else used  # what it returns is found out round by round


_takes_loc: dict[Any, bool] = {}


def _has_loc(function: Any) -> bool:
    """`base._has_loc`, which asks `inspect.signature` each time that an implementation is looked up."""
    if type(function) is not python_types.FunctionType or "__wrapped__" in function.__dict__:
        return "loc" in base.utils.pysignature(function).parameters
    code = function.__code__
    if code not in _takes_loc:
        _takes_loc[code] = "loc" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return _takes_loc[code]


def _when_modules_were_imported(refresh: Any) -> Any:
    """`refresh` of a context, which searches all registries for new declarations before each function."""
    seen: dict[Any, int] = {}

    def refresh_if_new(self: Any) -> None:
        if seen.get(self) != len(sys.modules):
            refresh(self)
            seen[self] = len(sys.modules)

    return refresh_if_new


def _alloca(self: Any, name: str, kind: Any, datamodel: Any = None) -> Any:
    """`Lower.alloca_lltype` without debug information, for which it computes the size of each variable."""
    return cgutils.alloca_once(self.builder, kind, name=name, zfill=False)


def _of_counted(change: Any) -> Any:
    """`Lower.incref` or `decref`, which look for references in the type of each value that is stored or deleted."""
    is_counted: dict[types.Type, bool] = {}

    def change_if_counted(self: Any, kind: Any, value: Any) -> None:
        if kind not in is_counted:
            is_counted[kind] = self.context.data_model_manager[kind].contains_nrt_meminfo()
        if is_counted[kind]:
            change(self, kind, value)

    return change_if_counted


def _is_same_variable(self: Any, other: Any) -> Any:
    """`ir.Var.__eq__`, which compares copies of both dictionaries without scope and position: the names are left."""
    return self is other or (type(other) is ir.Var and self.name == other.name)
