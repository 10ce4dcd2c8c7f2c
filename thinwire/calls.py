"""How the calls of a fleet are made: apart from the user's gradients, and by the lead of an island alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from .fleet import Fleet

Call = TypeVar("Call", bound=Callable[..., Any])


def apart(call: Call) -> Call:
    """Without gradients; and what is made inside `torch.inference_mode` lasts, and may be changed after it."""

    @wraps(call)
    def made(*args: Any, **options: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return call(*args, **options)

    return made  # type: ignore[return-value]


def lasting(call: Call) -> Call:
    """What changes the model or its fleet for good, and not inside `evaluating`, which puts the old values back."""

    @wraps(call)
    def made(fleet: Fleet, *args: Any, **options: Any) -> Any:
        if fleet.evaluations:
            what = "a training step" if call.__name__ == "before_step" else f"fleet.{call.__name__}()"
            raise ValueError(f"{what} inside fleet.evaluating() would be undone at its end: make it after that block")
        return call(fleet, *args, **options)

    return made  # type: ignore[return-value]


def led(call: Call) -> Call:
    """A method of a fleet that the lead of an island makes alone, while the other ranks lend it their parts."""

    @wraps(call)
    def conducted(fleet: Fleet, *args: Any, **options: Any) -> Any:
        fleet._open()
        fleet.refuse_lent()
        return fleet.island.conduct(fleet, partial(call, fleet, *args, **options))

    return conducted  # type: ignore[return-value]
