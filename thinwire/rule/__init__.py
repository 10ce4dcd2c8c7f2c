"""HOW the mean of what the workers sent is applied.

A rule reads the live tensors of a row (`x`) and its own state, and answers one message: `send` commits nothing, so a
round that is lost never happened. Delayed and eager updates take their outer step at launch by definition; that is
`depart`, and what it returns is kept with the message until the answer lands (`recv`) or is given up (`lose`).
"""

from .average import Average, Overwrite, Reset
from .base import Rule, Scope
from .launched import Delayed, Eager
from .momentum import SharedMomentum
from .outer import Carry, Outer
from .reduced import Reduced
from .sign import Sign
from .state import State
from .step import SGD, Nesterov, check_fraction

__all__ = [
    "SGD",
    "Average",
    "Carry",
    "Delayed",
    "Eager",
    "Nesterov",
    "Outer",
    "Overwrite",
    "Reduced",
    "Reset",
    "Rule",
    "Scope",
    "SharedMomentum",
    "Sign",
    "State",
    "check_fraction",
]
