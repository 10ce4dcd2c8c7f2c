"""The one error of the trainer that is the user's to mend."""

from __future__ import annotations

import difflib
import re
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


@contextmanager
def memory_as_user_error() -> Iterator[None]:
    """Too large a batch or model: torch says so on a GPU and on a CPU in two ways, NumPy in a third."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        asked = re.search(r"allocate ([\d.]+ ?\w+)", str(error))
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        size = f" (asked for {asked[1]})" if asked else ""
        cure = "lower train.batch and raise train.accumulate, or take a shorter model.context or a smaller model"
        raise UserError(f"out of memory{size}: {cure}") from error
