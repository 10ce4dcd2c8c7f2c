"""Local SGD (arXiv 1805.09767): `x = E[x_m]` every H steps. With H = 1 and plain SGD it is DDP."""

from __future__ import annotations

from ..replica import params
from ..rule import Average
from ..schedule import Every
from ..table import Method, Sync
from .common import table


def local_sgd(every: int, delay: int = 0) -> Method:
    """Workers train alone and average their parameters every `every` steps; the mean lands `delay` steps later.

    >>> print(local_sgd(every=16).rows[0])
    params | every 16 | Average() | Float32()
    """
    return table("local_sgd", Sync(params, Every(every, delay=delay), Average()), every=every)
