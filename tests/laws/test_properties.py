"""Tables nobody wrote down: random rows, periods, offsets, delays and codecs."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw

from .entries import FRAGMENTS, Entry, adamw, all_equal, fleet_of, odd_model, same, snapshot, train
from .test_common import after_reload

COARSE = [
    tw.Int8(),
    tw.E3M0(),
    tw.TwoBit(),
    tw.TopK(3, 16),
    tw.TopK(2, 64, values=tw.TwoBit(), merge="mean"),
    tw.TopK(4, 16, values=tw.E3M0()),
    tw.DCT(tw.TopK(5, values=tw.BFloat16()), 4),
    tw.DCT(tw.Int8(), 8),
    tw.DCT(tw.TopK(3, merge="mean"), 16),
]
FINE = [tw.Float32(), tw.BFloat16()]


@st.composite
def schedules(draw: Any, beyond: int = 0) -> tw.Every:
    """A delay of at most a period, and `beyond` periods more."""
    period = draw(st.integers(1, 5))
    return tw.Every(period, draw(st.integers(0, 4)), draw(st.integers(0, period * (1 + beyond))))


@st.composite
def parameter_rows(draw: Any, view: tw.View) -> tw.Sync:
    step = tw.Nesterov(draw(st.sampled_from([0.1, 0.3])), draw(st.sampled_from([0.0, 0.5])))
    rule = draw(
        st.sampled_from(
            [
                tw.Average(),
                tw.Outer(step),
                tw.Outer(step, 0.5),
                tw.Carry(step),
                tw.Eager(step),
                tw.Delayed(step),
                tw.SharedMomentum(0.2, 0.5),
            ]
        )
    )
    when = draw(schedules(beyond=1 if isinstance(rule, tw.Outer) and rule.mix else 0))
    if isinstance(rule, (tw.Eager, tw.Delayed)):
        when = tw.Every(when.period, when.offset, when.period * draw(st.integers(1, 2)))
    feedback = draw(st.sampled_from([None, 0.9])) if isinstance(rule, tw.Outer) else None
    return tw.Sync(view, when, rule, draw(st.sampled_from(FINE + COARSE)), feedback)


@st.composite
def tables(draw: Any) -> tw.Method:
    views = draw(st.sampled_from([[tw.params], [row.view for row in tw.eager_diloco(4, FRAGMENTS).rows[:2]]]))
    rows = [draw(parameter_rows(view)) for view in views]
    if draw(st.booleans()):
        rows.append(
            tw.Sync(tw.moment("exp_avg"), draw(schedules()), tw.Overwrite(), draw(st.sampled_from(FINE + COARSE)))
        )
    if draw(st.booleans()):
        rows.append(tw.Sync(tw.moment("exp_avg_sq"), draw(schedules()), tw.Overwrite(), draw(st.sampled_from(FINE))))
    return tw.table("drawn", *rows, every=draw(st.integers(1, 5)))


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(tables(), st.integers(1, 4), st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_bytes_are_the_price(method: tw.Method, workers: int, legs: list[int]) -> None:
    fleet, model = fleet_of(method, workers), odd_model()
    price = tw.cost(method, model, workers, adamw(model.parameters()))
    for steps in legs:
        train(fleet, steps)
        assert fleet.bytes_sent == price.bytes(fleet.steps)
        assert (fleet.wire_sent, fleet.wire_received) == price.wire(fleet.steps)
    assert fleet.events.counts == {}
    fleet.finish()
    assert all_equal(fleet)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(tables(), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_save_and_load(method: tw.Method, legs: list[int]) -> None:
    entry = Entry(method)
    plain, broken = fleet_of(method, 2), fleet_of(method, 2)
    for steps in legs:
        train(plain, steps)
        broken = after_reload(train(broken, steps), entry)
    train(plain, 4)
    train(broken, 4)
    assert same(snapshot(plain), snapshot(broken)) and broken.steps == plain.steps
