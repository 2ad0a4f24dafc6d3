"""How far float32 may be from a float64 computation: its errors, bounded operation by operation.

Under `Float32Errors` every tensor of a float64 computation gets an attribute `error` if float32 would round it: at most
this much it is off, whichever processor computes it. An operation passes the errors of its inputs on: it is computed
again at the ends of their intervals, as each operation here is monotone in every input. To that it adds its own:
`ROUNDINGS` of the result or, for a sum, one of all terms for every term, as their order is not known.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDING = 2.0**-24
ROUNDINGS = 4
"""Of an operation: an exponential of a library may be a unit in the last place off (two roundings), and a kernel may
need two operations for one here, such as a product with an inverse for a quotient."""
ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "exp", "expm1", "log", "pow", "sigmoid", "clamp"}
SUMS = {"sum", "segment_reduce"}
EXACT = {
    *("_to_copy", "amax", "full_like", "gather", "index", "index_copy", "index_select", "masked_fill", "neg"),
    *("ones_like", "scalar_tensor", "scatter", "select", "stack", "unsqueeze", "where", "zeros_like"),
}
ORDER = {"lt", "le", "gt", "ge"}


class Float32Errors(TorchDispatchMode):
    """Bounds the errors of what is computed in its context.

    Attributes:
        undecided: Whether a comparison may turn out differently in float32: what depends on it has no bound.
    """

    def __init__(self) -> None:
        super().__init__()
        self.undecided = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        out = function(*args, **kwargs)
        inputs = [value for arg in args for value in (arg if isinstance(arg, list) else [arg])]
        inexact = {id(x): x for x in inputs if hasattr(x, "error")}
        ends = [((key, x - x.error), (key, x + x.error)) for key, x in inexact.items()]
        there = [function(*_moved(args, dict(corner)), **kwargs) for corner in product(*ends) if corner]
        if name in ORDER:
            self.undecided |= not all(torch.equal(other, out) for other in there)
        if not out.is_floating_point():
            return out
        assert name in ARITHMETIC | SUMS | EXACT, f"{name} has no bound yet"
        errors = [torch.where(other == out, 0.0, (other - out).abs()) for other in there]
        error = torch.stack(errors).amax(0) if errors else torch.zeros(())
        if name in ARITHMETIC:
            error = error + ROUNDINGS * ROUNDING * out.abs()
        elif name in SUMS:
            sizes = function(args[0].abs(), *args[1:], **kwargs)
            error = error + (args[0].shape[-1] + ROUNDINGS) * ROUNDING * sizes
        if error.any():
            out.error = error
        return out


def _moved(args: Any, to: dict[int, Tensor]) -> list[Any]:
    return [[to.get(id(x), x) for x in arg] if isinstance(arg, list) else to.get(id(arg), arg) for arg in args]


def assert_near(found: Tensor, exact: Tensor, error: Tensor | None = None) -> None:
    """Requires results of float32 to be within the error of those in float64, `exact.error` unless it is given."""
    error = getattr(exact, "error", torch.zeros_like(exact)) if error is None else error
    assert error.isfinite().all(), "the error has no bound"
    off = (found.double() - exact).abs()
    assert (off <= error + 1e-30).all(), f"off by {off.max():.3g}, {(off / (error + 1e-30)).max():.3g} times the bound"
