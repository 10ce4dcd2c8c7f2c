"""Every public name has a docstring with an example, and the examples are run (see tests/project)."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

import thinwire


def is_described(name: str) -> bool:
    """By its own docstring; a plain value, such as `tw.params`, by that of its class."""
    public = getattr(thinwire, name)
    described = public if inspect.isclass(public) or inspect.isfunction(public) else type(public)
    module = importlib.import_module(described.__module__)
    found = doctest.DocTestFinder(recurse=True).find(module, module.__name__)
    wanted = f"{module.__name__}.{described.__qualname__}"
    inside = [test for test in found if test.name == wanted or test.name.startswith(f"{wanted}.")]
    return bool(inspect.getdoc(described)) and any(test.examples for test in inside)


@pytest.mark.parametrize("name", thinwire.__all__)
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    assert is_described(name), f"tw.{name} has no example in its docstring"
