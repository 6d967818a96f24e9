"""The pickled request to the process that compiles: a task or a user's own step, wherever its functions stand."""

import io
import pickle
from typing import Any

import cloudpickle

from gspmd_lm.errors import InputError

_OPTIONS = "static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused", "inline"
_SHARDINGS = "in_shardings", "out_shardings"


def pickle_task(sent: Any) -> bytes:
    """A task, a step or a request as bytes, from which another process makes it. It has a `name`.

    That process imports modules anew. What stands in the script that runs, in a cell of a notebook or in a lambda is in
    the bytes. Raises InputError for what cannot be sent.
    """
    stream = io.BytesIO()
    try:
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
