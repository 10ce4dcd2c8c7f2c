"""How functions and objects of a user are written in a table: alike on every worker, so without an address."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def of_function(call: Callable[..., Any]) -> str:
    """
    >>> of_function(partial(str.startswith, "0.")), of_function(len)
    ("startswith('0.')", 'len')
    """
    if isinstance(call, partial):
        return f"{of_function(call.func)}({_listed(call.args, call.keywords)})"
    return getattr(call, "__name__", None) or of_object(call)


def of_object(thing: Any) -> str:
    """As it says itself; else its type with its attributes, those that are private left out.

    >>> class Starts:
    ...     def __init__(self, start): self.start = start
    >>> of_object(Starts("0."))
    "Starts(start='0.')"
    """
    says = any({"__str__", "__repr__"} & vars(kind).keys() for kind in type(thing).__mro__ if kind is not object)
    return str(thing) if says else of_attributes(thing)


def of_attributes(thing: Any) -> str:
    given = {name: value for name, value in getattr(thing, "__dict__", {}).items() if not name.startswith("_")}
    return f"{type(thing).__name__}({_listed((), given)})"


def _listed(args: tuple[Any, ...], named: dict[str, Any]) -> str:
    return ", ".join([*map(_said, args), *(f"{name}={_said(value)}" for name, value in named.items())])


def _said(value: Any) -> str:
    return of_function(value) if callable(value) else repr(value)
