"""What processes that compile or estimate are sent: a task or a user's own step, wherever its functions stand."""

import io
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import cloudpickle

from gspmd_lm.errors import InputError

_OPTIONS = "static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused", "inline"
_SHARDINGS = "in_shardings", "out_shardings"
# Options of jax besides those of its traces that decide what a program computes, or how it is compiled.
_OTHER_OPTIONS = (
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_optimization_level",
    "jax_memory_fitting_level",
)


def read_jax_options() -> dict[str, Any]:
    """The current values of the options of jax that change what is traced or compiled, such as jax_enable_x64.

    `jax_disable_jit` is none of them, since a step that is compiled does without it. Where jax was not imported yet,
    there are none: a process has those of its environment, as any other one that is started here.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        return {}
    from jax._src import config as internal  # jax has no public name for what decides a trace

    names_of_traces: Any = internal.trace_context_names
    names = {*names_of_traces(), *_OTHER_OPTIONS} - {"jax_disable_jit"}
    plain = bool, int, float, str, type(None)
    return {name: value for name, value in jax.config.values.items() if name in names and isinstance(value, plain)}


def load_task(sent: bytes) -> Any:
    """What `pickle_task` made bytes of. Its options of jax are set first, and then modules are imported with them."""
    stream = io.BytesIO(sent)
    if options := pickle.load(stream):
        import jax

        for name, value in options.items():
            if jax.config.values[name] != value:  # some of them warn whenever they are set
                jax.config.update(name, value)
    return pickle.load(stream)


def pickle_task(sent: Any, jax_options: Mapping[str, Any]) -> bytes:
    """A task, a step or a request as bytes, from which another process makes it by `load_task`. It has a `name`.

    jax_options: those that the other process gets, as `read_jax_options` found them.

    That process imports modules anew. What stands in the script that runs, in a cell of a notebook or in a lambda is in
    the bytes. Raises InputError for what cannot be sent.
    """
    stream = io.BytesIO()
    try:
        pickle.dump(jax_options, stream)
        _Pickler(stream).dump(sent)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{sent.name}: its functions cannot be sent to the process that compiles: {error}\n"
            "  fix   make inside of them what no other process can have, such as a mesh, a device or an open file"
        ) from error
    return stream.getvalue()


class _Pickler(cloudpickle.Pickler):
    """That of cloudpickle, which leaves out of a jitted function what its methods `trace` and `lower` need."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj).__name__ != "PjitFunction":
            return super().reducer_override(obj)
        how = obj._jit_info  # jax has no public name for the options of a jitted function
        options = {name: getattr(how, name) for name in _OPTIONS} | {"compiler_options": dict(how.compiler_options_kvs)}
        for name in _SHARDINGS:
            given = getattr(how, f"{name}_treedef").unflatten(getattr(how, f"{name}_leaves"))
            options |= {} if type(given).__name__ == "UnspecifiedValue" else {name: given}
        return _jit_again, (obj.__wrapped__, options)


def _jit_again(function: Any, options: dict[str, Any]) -> Any:
    import jax

    return jax.jit(function, **options)
