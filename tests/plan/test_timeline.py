"""Laws of the timeline, and an event-by-event reference without any closed form."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.plan.timeline import Compute, Event, Link, Message, Timeline


def reference(layers, step_time, rate, events, steps):
    """One worker, one link, layered events: every node one after another, as the papers' text says."""
    unit = step_time / (3 * layers - 1)
    clock = free = 0.0
    ready = {}  # (step, layer) -> when its message is there
    for step in range(steps):
        for layer in range(layers):
            clock = max(clock, ready.get((step, layer), 0.0)) + unit
        for layer in reversed(range(layers)):
            clock += unit if layer else 0.0  # activations
            clock += unit  # parameters
            for event in events:
                if event.step == step and layer in event.layers:
                    free = max(free, clock) + event.message.sent / len(event.layers) / rate
                    at = (step + 1 + event.slack, layer)
                    ready[at] = max(ready.get(at, 0.0), free)
    return steps * step_time / clock


@st.composite
def layered(draw):
    layers, steps = draw(st.integers(1, 7)), draw(st.integers(1, 12))
    chosen = draw(st.sets(st.integers(0, steps - 1)))  # at most one event a step, as in the papers
    events = []
    for step in sorted(chosen):
        which = draw(st.sets(st.integers(0, layers - 1), min_size=1))
        size = draw(st.floats(0.1, 50))
        events.append(Event(step, Message(size, size), draw(st.integers(0, 4)), tuple(which)))
    return layers, steps, events


@given(layered(), st.floats(0.1, 5), st.floats(0.5, 100))
def test_equals_the_node_by_node_reference(case, step_time, rate):
    layers, steps, events = case
    got = Timeline(Compute([step_time], layers), [Link(rate, rate)]).utilization(events, steps)
    assert got[0] == pytest.approx(reference(layers, step_time, rate, events, steps))


@st.composite
def whole(draw):
    steps = draw(st.integers(1, 30))
    sizes, shares = st.floats(0, 50), st.sampled_from([0.0, 0.6])
    row = st.tuples(st.integers(1, 10), st.integers(0, 9), st.integers(0, 12), sizes, shares)
    rows = draw(st.lists(row, max_size=4))
    return steps, [
        Event(step - 1, Message(size, size / 2, legs=2, handling=0.01, second=second), delay, row=number)
        for number, (period, offset, delay, size, second) in enumerate(rows)
        for step in range(offset + period, steps + 1, period)
    ]


@given(st.one_of(whole(), layered().map(lambda case: case[1:])), st.integers(1, 3))
def test_more_bandwidth_never_lowers_utilization(case, workers):
    steps, events = case
    compute = Compute([1.0, 1.3, 0.7][:workers], layers=7)
    rates = np.logspace(-1, 3, 40)
    got = Timeline(compute, [Link(rates, 2 * rates, latency=0.1, jitter=0.05)]).utilization(events, steps)
    assert (np.diff(got) >= -1e-12).all()
    assert (got > 0).all() and (got <= 1 + 1e-12).all()


@given(whole(), st.integers(1, 5))
def test_more_slack_never_lowers_utilization(case, more):
    steps, events = case
    patient = [Event(e.step, e.message, e.slack + more, row=e.row) for e in events]
    timeline = Timeline(Compute([1.0]), [Link(3.0, 3.0, latency=0.1)])
    assert timeline.utilization(patient, steps)[0] >= timeline.utilization(events, steps)[0] - 1e-12


def test_a_blocking_exchange_adds_its_time():
    """10 steps of 2 s, a message of 4 s and two latencies of .5 s after steps 5 and 10."""
    events = [Event(step, Message(8, 4, legs=2)) for step in (4, 9)]
    timeline = Timeline(Compute([2.0]), [Link(up=2, down=2, latency=0.5)])
    assert timeline.utilization(events, 10)[0] == pytest.approx(20 / (20 + 2 * 5))


def test_a_hidden_exchange_costs_nothing_and_a_late_one_its_rest():
    message = Message(7, 7)
    timeline = Timeline(Compute([1.0]), [Link(1.0, 1.0)])  # 7 s on the line
    assert timeline.utilization([Event(0, message, slack=8)], 20)[0] == 1
    assert timeline.utilization([Event(0, message, slack=4)], 20)[0] == pytest.approx(20 / 23)


def test_the_link_serves_one_message_after_another():
    both = [Event(0, Message(3, 3), slack=5, row=row) for row in (0, 1)]
    timeline = Timeline(Compute([1.0]), [Link(1.0, 1.0)])
    assert timeline.utilization(both, 10)[0] == pytest.approx(10 / 11)


def test_a_second_leg_starts_only_between_two_steps():
    """4 s in all, 1 s of it in the second leg, steps of 5 s: one step of delay cannot hide the second leg."""
    message = Message(4, 4, second=0.25)
    timeline = Timeline(Compute([5.0]), [Link(1.0, 1.0)])
    walls = [10 / float(timeline.utilization([Event(0, message, slack)], 2)[0]) for slack in (0, 1, 2)]
    assert walls == pytest.approx([14, 11, 10])


def test_up_and_down_are_used_at_the_same_time():
    timeline = Timeline(Compute([1.0]), [Link(up=1.0, down=4.0)])
    assert timeline.utilization([Event(0, Message(1, 12))], 1)[0] == pytest.approx(1 / 4)
    assert timeline.utilization([Event(0, Message(5, 12))], 1)[0] == pytest.approx(1 / 6)


def test_the_slowest_worker_and_the_slowest_line_decide():
    compute = Compute([1.0, 2.0])
    timeline = Timeline(compute, [Link(4.0, 4.0), Link(1.0, 1.0)])
    assert timeline.utilization([Event(0, Message(4, 4))], 1)[0] == pytest.approx(1.5 / 6)


def test_jitter_is_the_same_at_every_bandwidth_and_for_every_run():
    events = [Event(step, Message(1, 1, legs=3)) for step in range(50)]
    link = Link(np.array([5.0, 5.0]), np.array([5.0, 5.0]), latency=0.1, jitter=0.05)
    first, second = (Timeline(Compute([1.0]), [link]).utilization(events, 50) for _ in range(2))
    assert first[0] == first[1] == second[0]
    steady = Timeline(Compute([1.0]), [Link(5.0, 5.0, latency=0.1)]).utilization(events, 50)
    assert first[0] != steady[0] and first[0] == pytest.approx(steady[0], rel=0.05)


@settings(max_examples=20)
@given(whole())
def test_a_sweep_is_many_single_runs(case):
    steps, events = case
    rates = np.array([0.5, 3.0, 40.0])
    together = Timeline(Compute([1.0]), [Link(rates, rates)]).utilization(events, steps)
    alone = [Timeline(Compute([1.0]), [Link(r, r)]).utilization(events, steps)[0] for r in rates]
    assert together == pytest.approx(alone)
