"""Every method on the timeline: the events are the engine's own rows, the bytes are `tw.cost`'s."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.plan.advisor import Advisor, Limits, Site, Trouble, equal_batches, settings
from thinwire.plan.method import NONE, Overhead, Sketch, events, utilization
from thinwire.plan.timeline import Compute, Link
from thinwire.train.methods import build_method, methods

SETTINGS = {setting["name"]: setting for setting in settings(layers=12)}
RATES = np.logspace(4, 10, 25)  # bytes per second
PARAMETERS, LAYERS = 12_000_000, 12


def priced(name, workers=4, parameters=PARAMETERS, **changes):
    model = Sketch(parameters, LAYERS)
    return tw.cost(build_method(SETTINGS[name] | changes, model), model, workers)


def site(**changes):
    facts = {"parameters": PARAMETERS, "layers": LAYERS, "step_times": (0.5,) * 4, "links": (Link(1e7, 1e7, 0.01),)}
    return Site(**(facts | {"batch_tokens": 1000} | changes))


def test_every_method_of_the_library_is_planned():
    assert set(SETTINGS) == set(methods())


@pytest.mark.parametrize(("parameters", "layers"), [(7 * 10**9, 32), (1000, 3), (1023, 7), (12_345_678, 12)])
def test_a_sketch_has_the_parameters_asked_for(parameters, layers):
    sketch = Sketch(parameters, layers)
    blocks = {sum(p.numel() for p in block.parameters()) for block in sketch.layers}
    assert sum(p.numel() for p in sketch.parameters()) == parameters
    assert len(sketch.layers) == layers and len(blocks) == 1 and layers * blocks.pop() > parameters - 1024 * layers


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_simulator_and_the_cost_agree_to_the_byte(name, workers):
    price = priced(name, workers)
    for steps in (1, 31, 95, 600):
        played = list(events(price, workers, steps, NONE))
        assert (sum(e.message.sent for e in played), sum(e.message.received for e in played)) == price.wire(steps)


@pytest.mark.parametrize("name", SETTINGS)
def test_events_are_where_the_engine_launches(name):
    """After step t when t > offset and (t - offset) % period == 0."""
    price = priced(name)
    played = {(e.row, e.step + 1, e.slack) for e in events(price, 4, 200)}
    assert played == {
        (number, t, row.when.delay)
        for number, row in enumerate(price.rows)
        for t in range(1, 201)
        if row.bytes and t > row.when.offset and (t - row.when.offset) % row.when.period == 0
    }


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_more_bandwidth_never_lowers_utilization(name, workers):
    links = [Link(RATES, 2 * RATES, latency=0.03, jitter=0.01)]
    got = utilization(priced(name, workers), Compute([0.5] * workers), links)
    assert (np.diff(got) >= -1e-12).all() and got[-1] <= 1 + 1e-12


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_at_equal_bandwidth_the_methods_keep_their_order(workers):
    order = ("ddp", "diloco", "streaming_diloco", "eager_diloco")
    links = [Link(RATES, RATES, latency=0.03)]
    got = [utilization(priced(name, workers), Compute([2.0] * workers), links) for name in order]
    assert (np.diff(got, axis=0) >= -1e-12).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_twice_the_parameters_are_twice_the_bytes(name):
    """Sizes of whole blocks of every codec, so that nothing is padded; 2-bit values add one small table a tensor."""
    once, twice = (priced(name, parameters=n * 12 * 2**20).bytes_per_step for n in (1, 2))
    assert twice == pytest.approx(2 * once, rel=1e-3 if name in ("sparseloco", "sparse_averaging") else 1e-15)


@pytest.mark.parametrize("every", [16, 32, 256])
def test_desloc_is_its_period_over_one_and_a_half_against_ddp(every):
    desloc, ddp = priced("desloc", every=every), priced("ddp")
    steps = 6 * every
    assert Fraction(ddp.bytes(steps), desloc.bytes(steps)) == Fraction(2 * every, 3)
    assert ddp.bytes_per_step / desloc.bytes_per_step == pytest.approx(every / 1.5, rel=1e-15)


def test_ddp_blocks_for_each_exchange():
    """Two workers, an all-reduce of all parameters: 4 P bytes out and in, and two latencies, after every step."""
    price = priced("ddp", workers=2)
    seconds = price.rows[0].sent / 1e7 + 2 * 0.01
    got = utilization(price, Compute([0.5, 0.5]), [Link(1e7, 1e7, latency=0.01)], NONE)
    assert got[0] == pytest.approx(0.5 / (0.5 + seconds))


def test_overheads_only_cost():
    bare = utilization(priced("diloco"), Compute([0.5] * 4), [Link(RATES, RATES)], NONE)
    real = utilization(priced("diloco"), Compute([0.5] * 4), [Link(RATES, RATES)], Overhead(1.04, handling=1e-9))
    assert (real < bare).all()


def test_an_asymmetric_line_is_as_slow_as_its_slow_way():
    price = priced("diloco")
    slow, up, down = (
        utilization(price, Compute([0.5] * 4), [link])[0] for link in (Link(1e6, 1e6), Link(1e6, 1e9), Link(1e9, 1e6))
    )
    assert slow == up == down


def test_settings_do_not_depend_on_the_link():
    slow, fast = (Advisor(site(links=(Link(rate, rate),)), 10**9).table() for rate in (1e5, 1e9))
    same = ("method", "every", "fragments", "delay", "codec", "bytes_per_step", "command")
    assert [[getattr(row, key) for key in same] for row in slow] == [
        [getattr(row, key) for key in same] for row in fast
    ]


def test_a_plenty_line_is_given_ddp_and_a_thin_one_less_talk():
    assert Advisor(site(links=(Link(1e10, 1e10),)), 10**9).recommend().method == "ddp"
    thin = Advisor(site(links=(Link(1e6, 1e6, 0.03),)), 10**9).recommend()
    assert thin.method != "ddp" and thin.utilization >= 0.9


@pytest.mark.parametrize("steps", [(1.2, 0.8), (0.5, 2.0)])
def test_unequal_machines_are_given_the_least_loss_too(steps):
    """As machines all as slow as the slowest are; no method makes the fast ones busier."""
    links = (Link(1e11, 1e11),)
    unequal = Advisor(site(step_times=steps, links=links), 10**9).recommend()
    equal = Advisor(site(step_times=(max(steps),) * 2, links=links), 10**9).recommend()
    assert unequal.utilization == pytest.approx(equal.utilization * sum(steps) / 2 / max(steps))
    assert (unequal.method, unequal.every) == (equal.method, equal.every) == ("ddp", 1)
    assert unequal.seconds == pytest.approx(equal.seconds)


def test_a_replacement_is_healed_over_its_own_line_which_may_be_the_slowest():
    trouble = Trouble(mtbf=1800.0)
    mixed = site(step_times=(0.5, 0.5), links=(Link(1e8, 1e8), Link(1e6, 1e6)))
    slow = site(step_times=(0.5, 0.5), links=(Link(1e6, 1e6),))
    goodputs = [Advisor(where, 10**9, trouble=trouble).assess(SETTINGS["diloco"]).goodput for where in (mixed, slow)]
    assert goodputs[0] == goodputs[1]


def test_curves_pass_through_the_table_where_the_slowest_line_is():
    """Unequal lines keep their proportions; at another rate the whole site is faster or slower."""
    lines = (Link(1e7, 2e7), Link(1e6, 5e5), Link(1e8, 1e8), Link(1e7, 1e7))
    advisor = Advisor(site(links=lines), 10**9)
    assert advisor.site.slowest_up == 1e6
    curves = advisor.curves(np.array([1e6, 1e7]))
    tenfold = Advisor(site(links=tuple(Link(10 * line.up, 10 * line.down) for line in lines)), 10**9)
    for row, faster in zip(advisor.table(), tenfold.table(), strict=True):
        assert curves[f"{row.method} every {row.every}"] == pytest.approx([row.utilization, faster.utilization])


def test_what_does_not_fit_is_refused_or_put_on_the_host():
    plain = 16 * PARAMETERS
    none = Advisor(site(), 10**9, Limits(device=plain - 1))
    assert not any(row.fits for row in none.table()) and none.recommend() is None
    tight = plain + 7 * PARAMETERS  # streaming needs more, and less once its outer state is on the host
    row = Advisor(site(), 10**9, Limits(device=tight)).assess(SETTINGS["streaming_diloco"])
    assert row.fits and row.memory_host > 0 and "offload" in row.command
    assert not Advisor(site(), 10**9, Limits(device=tight, host=1000)).assess(SETTINGS["streaming_diloco"]).fits


def test_time_for_a_budget():
    row = Advisor(site(), tokens=4_000_000).assess({"name": "ddp"})
    assert row.seconds == pytest.approx(1000 * 0.5 / row.utilization)
    assert row.sent_per_day == pytest.approx(86400 / (0.5 / row.utilization) * row.bytes_per_step * 1.5, rel=1e-2)


@pytest.mark.parametrize("rate", [1e2, 1e4])
def test_bytes_of_a_day_are_the_mean_also_where_a_round_takes_longer(rate):
    row = Advisor(site(links=(Link(rate, rate),)), 1000).assess({"name": "local_sgd", "every": 32})
    steps = 86400 * row.utilization / 0.5
    # a ring all-reduce of 48 MB between four workers, once in 32 steps
    assert row.sent_per_day == pytest.approx(steps / 32 * 1.5 * 48e6, rel=1e-3)


def test_goodput_is_there_when_asked_for():
    rows = Advisor(site(), 10**9, trouble=Trouble(mtbf=3600.0, slow=0.25)).table()
    assert all(0 < share <= 1.01 for row in rows for share in row.goodput.values())


def test_batches_that_make_steps_equal():
    batches, step = equal_batches([1.0, 2.0, 4.0], 700)
    assert batches == [1200, 600, 300]
    assert step == pytest.approx(1.0 * 1200 / 700)


def test_half_life_periods_are_priced_with_an_optimizer_only():
    model, method = torch.nn.Linear(4, 2), tw.desloc(2, moments="half-life")
    with pytest.raises(ValueError, match="reads the periods off the optimizer: pass it"):
        tw.cost(method, model, workers=2)
    price = tw.cost(method, model, workers=2, optimizer=torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95)))
    assert [row.when.period for row in price.rows] == [2, 7, 14]  # ln .5 / ln beta: 6.6 and 13.5
