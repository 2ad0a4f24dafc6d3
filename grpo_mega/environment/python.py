"""Python as a tool: cells that share their variables, in the sandbox of `judges/sandbox`.

Nothing lives between two calls: each runs the earlier cells of the sample and the new one in a fresh box. So a reply is
a function of the calls, a stop loses nothing, and a cell that ends its box leaves no trace.
"""

from __future__ import annotations

import json
from functools import cache

from grpo_mega.environment.calls import BadCall
from grpo_mega.judges.sandbox import BoxCall, Limits, Sandbox

# Runs in the box. What it returns comes through another pipe than what cells print.
_RUN = """
import ast, linecache, os, sys, traceback, types

def error_of(cell, name, namespace):
    linecache.cache[name] = len(cell), None, cell.splitlines(True), name
    try:
        tree = compile(cell, name, "exec", ast.PyCF_ONLY_AST)
        value = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        exec(compile(tree, name, "exec"), namespace)
        # As in a notebook, the value of a last expression is shown.
        exec(compile(ast.Interactive(value), name, "single"), namespace)
    except SystemExit:
        pass
    except BaseException as error:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next, limit=-3))
    return ""

def run(cells):
    # Dataclasses and pickles look for the module of a class.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    me, out = os.getpid(), sys.stdout
    shown, hidden = os.dup(1), os.open("/dev/null", os.O_WRONLY)
    for number, cell in enumerate(cells, 1):
        os.dup2(shown if number == len(cells) else hidden, 1)
        error = error_of(cell, f"<cell {number}>", main.__dict__)
        out.flush()
        # A process that a cell has forked gets here too.
        if os.getpid() != me:
            os._exit(0)
    # Threads and `atexit` of earlier cells may print again when Python ends.
    os.dup2(hidden, 1)
    return error.rstrip()
"""


class NoBox(BaseException):
    """Error: the machine could not run a cell. Not an Exception, which would be the model's to read."""


class Python:
    """Cells of Python.

    Attributes:
        limits: Limits of a call, in which all cells of the sample run. A subclass may have others.
    """

    limits = Limits()

    def __init__(self) -> None:
        """Raises SandboxUnavailable, which names the fix, where nothing can contain programs."""
        self._sandbox = _sandbox()
        self._cells: list[str] = []

    def reset(self, **row: object) -> None:
        """Begins without cells; they never see the problem's fields."""
        self._cells = []

    def python(self, code: str) -> str:
        """Runs a cell of Python with the standard library, after the cells before it.

        Args:
            code: The cell. What it prints is shown, and the value of its last line if that is an expression.
        """
        cells = [*self._cells, code]
        outcome = self._sandbox.python(_RUN, limits=self.limits, call=BoxCall("run", [cells]))
        if outcome.status == "infrastructure":
            raise NoBox(f"the sandbox could not run a cell: {outcome.reason}")
        if outcome.status == "exited" and outcome.result:
            self._cells, error = cells, str(json.loads(outcome.result))
        else:
            # Cells that ran before run again, so a call has less time than the last one.
            again = " (earlier cells run again, and count)" if self._cells else ""
            reason = outcome.reason + again if outcome.reason else f"it ended Python with code {outcome.exit_code}"
            error = f"{reason}. The cell is forgotten."
        output = outcome.stdout.decode(errors="replace").rstrip("\n")
        if error:
            raise BadCall(f"{error}\n\nIt had printed:\n{output}" if output else error)
        return output


@cache
def _sandbox() -> Sandbox:
    """One box, as a process answers one call at a time."""
    return Sandbox(boxes=1)
