"""DES-LOC (arXiv 2505.22549), Local Adam, and the two baselines its authors compare with.

    every Kx steps: x = outer(E[x]) ; every Ku steps: u = E[u] ; every Kv steps: v = E[v]

Equal periods and no outer step give Local Adam.
"""

from __future__ import annotations

from ..replica import moment, params
from ..rule import Average, Carry, Nesterov, Outer, Overwrite, Reset, Rule
from ..schedule import Every
from ..state_names import FIRST, SECOND
from ..table import HalfLife, Method, Sync
from .common import table

Moments = dict[str, int] | str | None


def desloc(every: int, moments: Moments = None, outer: Nesterov | None = None, delay: int = 0) -> Method:
    """Parameters meet every `every` steps and each optimizer moment on a period of its own.

    `moments` maps state names to periods. None: first moments 3 * every and second moments 6 * every, where the
    optimizer has them. "half-life": the steps in which each forgets half, from its beta, but at least `every`.
    `outer`: None averages the parameters; `tw.Nesterov(1.0, 0.9)` steps on the mean drift.

    >>> print(desloc(every=256))
    desloc: 4 rows (what | when | how it is applied | how it is written)
    params                              every 256   Average()    Float32()
    moment(exp_avg or momentum_buffer)  every 768   Overwrite()  Float32()
    moment(exp_avg_sq)                  every 1536  Overwrite()  Float32()
    buffers                             every 256   Overwrite()  Statistics()
    """
    first = Sync(params, Every(every, delay=delay), _rule(outer, delay))
    rows = [Sync(moment(*states), when, Overwrite()) for states, when in _periods(every, moments, delay)]
    return table("desloc", first, *rows, every=every)


def _rule(outer: Nesterov | None, delay: int) -> Rule:
    """With a delay the shared anchor steps when the mean lands, and progress made meanwhile is kept."""
    if outer is None:
        return Average()
    if not isinstance(outer, Nesterov):
        raise ValueError(f"outer must be None or an outer step such as tw.Nesterov(1.0, 0.9), not {outer!r}")
    return Carry(outer) if delay else Outer(outer)


def _periods(every: int, moments: Moments, delay: int) -> list[tuple[tuple[str, ...], Every | HalfLife]]:
    if moments is None:
        return [(FIRST, Every(3 * every, delay=delay)), (SECOND, Every(6 * every, delay=delay))]
    if moments == "half-life":
        return [(states, HalfLife(states, every, delay)) for states in (FIRST, SECOND)]
    if not isinstance(moments, dict):
        raise ValueError(f'moments must be None, "half-life" or {{state name: period}}, not {moments!r}')
    return [((state,), Every(period, delay=delay)) for state, period in moments.items()]


def local_adam(every: int, delay: int = 0) -> Method:
    """Parameters and the moments (exp_avg, exp_avg_sq, momentum_buffer) meet every `every` steps.

    >>> len(local_adam(every=32).rows)
    4
    """
    when = Every(every, delay=delay)
    rows = [Sync(moment(*states), when, Overwrite()) for states in (FIRST, SECOND)]
    return table("local_adam", Sync(params, when, Average()), *rows, every=every)


def local_states(every: int) -> Method:
    """Baseline: parameters are averaged, optimizer state stays local (FAVG+OPT).

    >>> len(local_states(every=32).rows)
    2
    """
    return Method("local_states", desloc(every, moments={}).rows)


def reset_states(every: int) -> Method:
    """Baseline: parameters are averaged, optimizer state starts anew at each sync (FAVG-OPT); it sends nothing more.

    >>> print(reset_states(every=32).rows[1])
    moment(exp_avg or momentum_buffer or exp_avg_sq) | every 32 | Reset() | -
    """
    resetting = Sync(moment(*FIRST, *SECOND), Every(every), Reset())
    return table("reset_states", Sync(params, Every(every), Average()), resetting, every=every)
