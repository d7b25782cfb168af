"""A user's mistake ends in one sentence and a non-zero exit, not in a traceback."""

import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """What is wrong, where, and what to do: one sentence for the person who started the command."""


def run_cli(main: Callable[[], int | None]) -> NoReturn:
    """Run a command's ``main``: a :class:`UserError` is printed to stderr and ends with exit code 2."""
    try:
        code = main()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code or 0)
