"""Expected quality: the papers' numbers come back at the papers' settings."""

import pytest

from thinwire.plan.quality import quality


@pytest.mark.parametrize(
    ("method", "size", "loss", "ddp"),
    [
        ("diloco", 35e6, 3.54, 3.51),
        ("streaming_diloco", 100e6, 3.21, 3.19),
        ("eager_diloco", 500e6, 2.69, 2.67),
        ("delayed_diloco", 500e6, 2.73, 2.67),
        ("eager_diloco", 1e9, 2.50, 2.49),
    ],
)
def test_published_losses_with_two_workers(method, size, loss, ddp):
    assert quality(method, 30, int(size), 2).percent == pytest.approx(100 * (loss / ddp - 1), abs=0.01)


def test_streaming_at_a_hundred_steps():
    assert quality("streaming_diloco", 100, 35_000_000, 2).percent == pytest.approx(100 * (3.56 / 3.51 - 1), abs=0.01)


@pytest.mark.parametrize(
    "method", ["diloco", "streaming_diloco", "eager_diloco", "sparseloco", "decoupled_momentum", "desloc"]
)
def test_longer_periods_and_more_workers_never_help(method):
    costs = [[quality(method, every, 10**9, m).percent for every in (30, 60, 240)] for m in (2, 4)]
    assert sorted(costs[0]) == costs[0] and sorted(costs[1]) == costs[1]
    assert all(few <= many for few, many in zip(*costs, strict=True))


def test_every_number_has_a_source():
    assert quality("ddp", 1, 10**9, 2).percent == 0
    for method in ("diloco", "streaming_diloco", "eager_diloco", "delayed_diloco", "sparseloco", "demo", "desloc"):
        assert "arXiv" in quality(method, 30, 10**9, 4).source
    assert quality("demo", 1, 10**9, 2).percent is None
