"""Goodput under failures, against what can be worked out by hand."""

import math

import numpy as np
import pytest

from thinwire.plan.failures import KINDS, QUORUM, Faults, Fleet, goodput

CALM = Faults()


@pytest.mark.parametrize("kind", ["synchronous", "quorum"])
def test_in_calm_only_the_exchange_costs(kind):
    fleet = Fleet(8, phase=40, exchange=10, every=10**8)
    assert goodput(kind, fleet, CALM) == pytest.approx(0.8, abs=1e-3)


def test_in_calm_eager_hides_what_fits_into_a_phase():
    assert goodput("eager", Fleet(8, phase=40, exchange=10, every=10**8), CALM) == pytest.approx(1, abs=1e-3)
    assert goodput("eager", Fleet(8, phase=40, exchange=50, every=10**8), CALM) == pytest.approx(0.8, abs=0.01)


def test_one_worker_that_dies_meets_the_renewal_formula():
    """A phase of P seconds, repeated after every death: (e^(P/T) - 1) (T + R) seconds on average."""
    phase, mtbf, recovery = 36.0, 200.0, 60.0
    expected = phase / ((math.exp(phase / mtbf) - 1) * (mtbf + recovery))
    fleet = Fleet(1, phase, 0.0, every=10**8)
    got = {kind: goodput(kind, fleet, Faults(mtbf, recovery), rounds=8000) for kind in KINDS}
    assert got["synchronous"] == pytest.approx(expected, rel=0.05)
    assert got["quorum"] == pytest.approx(expected, rel=0.05)
    # An eager worker comes back at the start of a phase of the fleet: half a phase is lost on average.
    late = phase / ((math.exp(phase / mtbf) - 1) * (mtbf + recovery + phase / 2))
    assert got["eager"] == pytest.approx(late, rel=0.05)


def test_rounds_wait_for_a_coordinator_that_is_away():
    """All stop where their phase ends: half a phase of each absence of R seconds, one in T + R, is not lost."""
    phase, mtbf, absence = 10.0, 600.0, 60.0
    faults = Faults(coordinator_mtbf=mtbf, absence=absence)
    fleet = Fleet(4, phase, 0.0, every=10**8)
    expected = 1 - (absence - phase / 2) / (mtbf + absence)
    assert goodput("quorum", fleet, faults, rounds=8000) == pytest.approx(expected, abs=0.015)
    hidden = 1 - (absence - phase * 3 / 2) / (mtbf + absence)  # an eager worker goes on for a phase more
    assert goodput("eager", fleet, faults, rounds=8000) == pytest.approx(hidden, abs=0.015)
    assert goodput("synchronous", fleet, faults) == pytest.approx(1, abs=1e-3)  # it has none


def test_slow_workers_hold_up_all_but_a_quorum():
    fleet = Fleet(1000, phase=36, exchange=0, every=30, slow=0.05, slowdown=2)
    assert goodput("synchronous", fleet, CALM) == pytest.approx(0.5, abs=0.02)
    assert goodput("eager", fleet, CALM) == pytest.approx(0.5, abs=0.02)
    assert goodput("quorum", fleet, CALM) > QUORUM * 0.95


@pytest.mark.parametrize("kind", ["synchronous", "eager"])
@pytest.mark.parametrize(("workers", "share"), [(8, 0.05), (2, 0.01), (50, 0.03)])
def test_a_share_below_one_worker_is_slow_in_some_rounds(kind, workers, share):
    """5% of 8 workers: one of them is slow in 40% of the rounds, which then take twice as long."""
    fleet = Fleet(workers, phase=36, exchange=0, every=10**8, slow=share, slowdown=2)
    rounds_slow = min(1.0, workers * share)
    assert goodput(kind, fleet, CALM, rounds=8000) == pytest.approx(1 / (1 + rounds_slow), abs=0.01)


def test_whole_workers_are_always_the_same_ones():
    fleet = Fleet(7, phase=36, exchange=0, slow=3 / 7, slowdown=2)
    assert all(fleet.speeds(luck).tolist() == [2, 2, 2, 1, 1, 1, 1] for luck in (1e-9, 0.5, 1 - 1e-9))


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_deaths_never_hurt(kind):
    fleet = Fleet(200, phase=36, exchange=5, every=30)
    got = [goodput(kind, fleet, Faults(mtbf)) for mtbf in (3e3, 3e4, 3e5, np.inf)]
    assert np.diff(got).min() > -0.005
    assert 0 < got[0] < got[-1] <= 1.01


@pytest.mark.parametrize("kind", ["synchronous", "quorum"])
@pytest.mark.parametrize("workers", [2, 1000])
def test_workers_that_never_live_through_a_phase_commit_nothing(kind, workers):
    faults = Faults(mtbf=10, coordinator_mtbf=1000)
    assert goodput(kind, Fleet(workers, phase=150, exchange=5, every=128), faults) == 0


def test_at_scale_one_death_stops_a_synchronous_fleet_and_no_other():
    fleet, faults = Fleet(4000, phase=36, exchange=5, every=30), Faults(mtbf=86400)
    got = {kind: goodput(kind, fleet, faults) for kind in KINDS}
    assert got["synchronous"] < 0.6 < 0.8 < got["quorum"] < got["eager"]


def test_the_same_seed_gives_the_same_answer():
    fleet, faults = Fleet(50, 36, 5, 30), Faults(1e4)
    assert goodput("eager", fleet, faults) == goodput("eager", fleet, faults)
