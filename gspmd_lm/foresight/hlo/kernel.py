"""What the code of a Pallas kernel for TPUs says of it. A compiled program carries it, as MLIR."""

import base64
import functools

Windows = tuple[tuple[int, ...], ...]


@functools.cache
def windows(body: str) -> Windows:
    """The shapes of the windows of operands and results that one step of a kernel works on, in their order.

    () for a kernel that fetches what it works on itself, and for XLA's own, which have no windows that we can read.
    `body` is the code in base 64.
    """
    from jax.extend.mlir import ir  # here, so that programs without kernels are read without jax

    with ir.Context() as context:
        context.allow_unregistered_dialects = True  # jax has no public name for that of kernels
        try:
            module = ir.Module.parse(base64.b64decode(body))
        except ir.MLIRError:
            return ()
        attributes = (operation.attributes for operation in module.body.operations)
        kernel = next((found for found in attributes if "window_params" in found), None)
        if kernel is None:
            return ()
        bounds = (ir.DictAttr(window)["window_bounds"] for window in ir.ArrayAttr(kernel["window_params"]))
        return tuple(tuple(ir.DenseI64ArrayAttr(sizes)) for sizes in bounds)
