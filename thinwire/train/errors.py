"""The one error of the trainer that is the user's to mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Bad input: one line that says what to do. The command line prints it and exits with status 2."""


def nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint for a misspelt word: the closest known one, else all of them, or what is said instead of very many."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else otherwise or f"known: {', '.join(options)}"


def file_line(error: OSError) -> str:
    """One line on a file that cannot be read or written."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


@contextmanager
def as_user_error() -> Iterator[None]:
    """While a run is set up, a ValueError is about what the user asked for, whoever raised it."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error
