"""Numbers with units, as people write them: `100Mbit`, `1.5 Gbit/s`, `2GB/s`, `40Mbit/200Mbit`, `30ms`, `24GiB`.

Inside thinwire a rate is bytes per second, a time is seconds and a size is bytes, always plain floats or ints.
Bits are powers of ten, as links are sold; bytes too, unless written with an `i` (`24GiB`).
"""

from __future__ import annotations

import math
import re

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {prefix + "i": 1024.0**power for power, prefix in enumerate("kmgtp", start=1)}
_PREFIX = _DECIMAL | _BINARY
_TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_LONG_TIME = {"sec": "s", "second": "s", "minute": "min", "hour": "h", "day": "d"}
_NUMBER = r"([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?)"

_RATES = "a rate such as 100Mbit, 1.5 Gbit/s or 2GB/s"
_TIMES = "a time such as 30ms, 1.2s, 5min, 12h or 3d"
_SIZES = "a size such as 80GB or 24GiB"
_COUNTS = "a positive number such as 7e9, 7B or 350M"


def rate(text: str) -> float:
    """Bytes per second.

    >>> rate("100Mbit"), rate("1.5 Gbit/s"), rate("2GB/s")
    (12500000.0, 187500000.0, 2000000000.0)
    """
    number, unit = _split(text, _RATES)
    scale, is_bits = _bits_or_bytes(re.sub(r"(/s|ps)$", "", unit, flags=re.IGNORECASE))
    if is_bits is None or number <= 0:
        raise ValueError(f"{text.strip()!r} is not {_RATES}")
    return _finite(number * scale / (8 if is_bits else 1), text, _RATES)


def line(text: str) -> tuple[float, float]:
    """Up and down rates of a line in bytes per second; one rate means both ways.

    >>> line("40Mbit/200Mbit"), line("8Mbit/s")
    ((5000000.0, 25000000.0), (1000000.0, 1000000.0))
    """
    # A slash parts two rates only when a number follows it: `1.5 Gbit/s` is one rate.
    parts = re.split(r"\s*/\s*(?=[0-9.+-])", text.strip())
    if len(parts) > 2:
        raise ValueError(f"{text.strip()!r} is not {_RATES}, or 40Mbit/200Mbit for up/down")
    up, down = rate(parts[0]), rate(parts[-1])
    return up, down


def duration(text: str) -> float:
    """Seconds; a bare number is seconds.

    >>> duration("30ms"), duration("1.2s"), duration("12h"), duration("1.2")
    (0.03, 1.2, 43200.0, 1.2)
    """
    number, unit = _split(text, _TIMES)
    unit = unit.lower()
    unit = _LONG_TIME.get(unit.removesuffix("s") if len(unit) > 2 else unit, unit) or "s"
    if unit not in _TIME or number < 0:
        raise ValueError(f"{text.strip()!r} is not {_TIMES}")
    return _finite(number * _TIME[unit], text, _TIMES)


def spread(text: str) -> tuple[float, float]:
    """A time and its jitter (standard deviation): `30ms`, or `30ms+-5ms`.

    >>> spread("30ms"), spread("30ms+-5ms")
    ((0.03, 0.0), (0.03, 0.005))
    """
    mean, _, jitter = text.replace("±", "+-").partition("+-")
    return duration(mean), duration(jitter) if jitter.strip() else 0.0


def size(text: str) -> int:
    """Bytes; a bare number is bytes.

    >>> size("80GB"), size("24GiB")
    (80000000000, 25769803776)
    """
    number, unit = _split(text, _SIZES)
    scale, is_bits = _bits_or_bytes(unit.replace("b", "B") or "B")  # nobody buys memory by the bit
    if is_bits is not False or number <= 0:
        raise ValueError(f"{text.strip()!r} is not {_SIZES}")
    return round(_finite(number * scale, text, _SIZES))


def count(text: str) -> int:
    """A positive whole number of things: parameters, tokens.

    >>> count("7e9"), count("350M"), count("1.5B")
    (7000000000, 350000000, 1500000000)
    """
    number, unit = _split(text, _COUNTS)
    value = _finite(number * _COUNT.get(unit.lower(), math.nan), text, _COUNTS)
    if value < 1 or value != round(value):
        raise ValueError(f"{text.strip()!r} is not {_COUNTS}")
    return round(value)


def share(text: str) -> float:
    """A share between 0 and 1, written `5%` or `.05`.

    >>> share("5%"), share(".25")
    (0.05, 0.25)
    """
    number, unit = _split(text, "a share such as 5% or .05")
    value = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 <= value <= 1:
        raise ValueError(f"{text.strip()!r} is not a share such as 5% or .05")
    return value


def show_rate(rate_: float) -> str:
    """Bits per second, as links are sold.

    >>> show_rate(12.5e6), show_rate(187.5e6)
    ('100 Mbit/s', '1.5 Gbit/s')
    """
    return _scaled(rate_ * 8, "bit/s")


def show_size(size_: float) -> str:
    """
    >>> show_size(80e9), show_size(1536)
    ('80 GB', '1.54 kB')
    """
    return _scaled(size_, "B")


def show_count(count_: float) -> str:
    """
    >>> show_count(7e9), show_count(350e6)
    ('7B', '350M')
    """
    return _scaled(count_, "").replace(" ", "").replace("G", "B")


def show_duration(seconds: float) -> str:
    """
    >>> show_duration(.03), show_duration(1.2), show_duration(5400), show_duration(200000)
    ('30 ms', '1.2 s', '1.5 h', '2.31 d')
    """
    for unit, from_ in (("d", 1.5 * 86400), ("h", 3600), ("min", 120), ("s", 1), ("ms", 1e-3), ("us", 0)):
        if seconds >= from_:
            return f"{_three(seconds / _TIME[unit])} {unit}"
    raise ValueError("a time is not negative")


def _split(text: str, accepted: str) -> tuple[float, str]:
    match = re.fullmatch(rf"\s*{_NUMBER}\s*(\S*)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text.strip()!r} is not {accepted}")
    return float(match[1].replace("_", "")), match[2]


def _bits_or_bytes(unit: str) -> tuple[float, bool | None]:
    """The scale of `GiB`, `Mbit`, `kB` and whether it counts bits (None: neither); only for a lone b does case tell."""
    match = re.fullmatch(r"([kmgtp]i?)?(bit|bits|byte|bytes|b)", unit, re.IGNORECASE)
    if match is None:
        return 0.0, None
    return _PREFIX[(match[1] or "").lower()], match[2] == "b" or match[2].lower().startswith("bit")


def _finite(value: float, text: str, accepted: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{text.strip()!r} is not {accepted}")
    return value


def _scaled(value: float, unit: str) -> str:
    """Three digits and a prefix."""
    for prefix in "PTGMk":
        if value >= 0.9995 * _DECIMAL[prefix.lower()]:
            return f"{_three(value / _DECIMAL[prefix.lower()])} {prefix}{unit}"
    return f"{_three(value)} {unit}"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
