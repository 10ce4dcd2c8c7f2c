"""Numbers of a run in words: the closing table, a comparison's and the page say them alike."""

from __future__ import annotations


def against_ddp(sent: float, ddp: float) -> str:
    """How many bytes a worker sent beside what DDP would have sent.

    >>> against_ddp(115, 1265), against_ddp(3, 1), against_ddp(7, 7), against_ddp(0, 7)
    ('11x fewer', '3x more', 'as many', 'nothing sent')
    """
    if not sent or not ddp:
        return "nothing sent" if not sent else "no step taken here"
    factor = max(ddp / sent, sent / ddp)
    if round(factor, 2) == 1:
        return "as many"
    return f"{_short(factor)}x {'fewer' if sent < ddp else 'more'}"


def _short(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"


def perplexity(value: float) -> str:
    """
    >>> perplexity(6.3171), perplexity(1.2e30)
    ('6.317', '1.2e+30')
    """
    return f"{value:.3g}" if value >= 1e6 else f"{value:.3f}"


def workers(count: int) -> str:
    """
    >>> workers(1), workers(4)
    ('1 worker', '4 workers')
    """
    return f"{count} worker" + ("" if count == 1 else "s")
