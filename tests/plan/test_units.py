"""Units as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire import units

PREFIX = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
numbers = st.floats(min_value=1e-3, max_value=1e6)
spaces = st.sampled_from(["", " "])


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("100Mbit", 12.5e6),
        ("1.5 Gbit/s", 187.5e6),
        ("2GB/s", 2e9),
        ("10Gbps", 1.25e9),
        ("10gbps", 1.25e9),
        ("10 GBps", 10e9),
        ("1MiB/s", 2**20),
        ("8 kbit/s", 1e3),
        ("1 mbits", 125e3),
        (".5 Gbit", 62.5e6),
        ("1e3 Mbit", 125e6),
    ],
)
def test_rates(text, bytes_per_second):
    assert units.rate(text) == bytes_per_second


@given(numbers, st.sampled_from(list(PREFIX)), spaces, st.sampled_from(["bit", "bit/s", "b/s", "bps", "bits/s"]))
def test_any_number_of_bits(number, prefix, space, unit):
    assert units.rate(f"{number}{space}{prefix}{unit}") == pytest.approx(number * PREFIX[prefix] / 8)


@given(numbers, st.sampled_from(list(PREFIX)), spaces, st.sampled_from(["B/s", "B", "Bps", "byte/s", "bytes/s"]))
def test_any_number_of_bytes(number, prefix, space, unit):
    assert units.rate(f"{number}{space}{prefix}{unit}") == pytest.approx(number * PREFIX[prefix])


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [
        ("40Mbit/200Mbit", 5e6, 25e6),
        ("40Mbit/s/200Mbit/s", 5e6, 25e6),
        ("40 Mbit / 200 Mbit", 5e6, 25e6),
        ("8Mbit/s", 1e6, 1e6),
    ],
)
def test_lines(text, up, down):
    assert units.line(text) == (up, down)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30ms", 0.03),
        ("1.2s", 1.2),
        ("1.2", 1.2),
        ("0s", 0),
        ("5 min", 300),
        ("12h", 43200),
        ("3 days", 259200),
        ("1 hour", 3600),
    ],
)
def test_durations(text, seconds):
    assert units.duration(text) == pytest.approx(seconds)


def test_spread():
    assert units.spread("30ms+-5ms") == units.spread("30ms ± 5ms") == (0.03, 0.005)
    assert units.spread("30ms") == (0.03, 0.0)


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("24GiB", 24 * 2**30), ("80 gb", 80 * 10**9), ("512", 512)]
)
def test_sizes(text, size):
    assert units.size(text) == size


@pytest.mark.parametrize(
    ("text", "number"), [("7e9", 7 * 10**9), ("350M", 350 * 10**6), ("1.5B", 1_500_000_000), ("1_000", 1000)]
)
def test_counts(text, number):
    assert units.count(text) == number


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.rate, "-5Mbit"),
        (units.rate, "0Mbit"),
        (units.rate, "100"),
        (units.rate, "5 parsec"),
        (units.rate, ""),
        (units.rate, "nan Mbit"),
        (units.rate, "1e999Mbit"),
        (units.line, "1Mbit/2Mbit/3Mbit"),
        (units.line, "1Mbit/-2Mbit"),
        (units.duration, "-1s"),
        (units.duration, "3 fortnights"),
        (units.spread, "30ms+-x"),
        (units.size, "80 Gbit"),
        (units.size, "0GB"),
        (units.count, "1.5"),
        (units.count, "-7e9"),
        (units.count, "many"),
        (units.share, "120%"),
    ],
)
def test_nonsense_is_refused_in_one_line(parse, text):
    with pytest.raises(ValueError, match="such as") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@given(st.text())
def test_no_text_breaks_a_parser(text):
    for parse in (units.rate, units.line, units.duration, units.spread, units.size, units.count, units.share):
        try:
            parse(text)
        except ValueError as error:
            assert "such as" in str(error)


@given(st.floats(min_value=1, max_value=1e15))
def test_what_is_shown_can_be_read_back(value):
    """To the three digits shown."""
    assert units.rate(units.show_rate(value)) == pytest.approx(value, rel=6e-3)
    assert units.size(units.show_size(value)) == pytest.approx(value, rel=6e-3, abs=0.51)


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_durations_can_be_read_back(value):
    assert units.duration(units.show_duration(value)) == pytest.approx(value, rel=6e-3)
