"""Calls that may never return: torch's store waits without end for a host that is stopped, cut off, or no store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def in_time(call: Callable[[], Found], seconds: float) -> Found:
    """What it returns or raises; a TimeoutError if it takes longer, and its thread is left behind.

    >>> in_time(lambda: 3, seconds=1)
    3
    """
    found: list[Found] = []
    raised: list[Exception] = []

    def ask() -> None:
        try:
            found.append(call())
        except Exception as error:
            raised.append(error)

    asking = threading.Thread(target=ask, name="thinwire asking", daemon=True)
    asking.start()
    asking.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return found[0]
