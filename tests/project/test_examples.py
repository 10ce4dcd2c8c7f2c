"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import thinwire


def module_names() -> list[str]:
    found = pkgutil.walk_packages(thinwire.__path__, "thinwire.", onerror=lambda _: None)
    return [module.name for module in found if not module.name.endswith("__main__")]  # those are programs


@pytest.mark.parametrize("name", module_names())
def test_docstring_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("thinwire"):
            raise
        pytest.skip(f"{error.name} is not installed")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result = doctest.testmod(module, extraglobs={"torch": torch, "tw": thinwire}, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
