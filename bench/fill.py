"""Puts numbers from the results into prose."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

from known import Known, NotRun, percent


def flow(text: str) -> str:
    """Every paragraph and every point of a list in lines of one width, whatever the numbers in it."""
    return "\n\n".join("\n".join(map(_fill, re.split(r"\n(?=- )", part))) for part in text.strip().split("\n\n"))


def _fill(part: str) -> str:
    indent = "  " if part.startswith("- ") else ""
    words = " ".join(part.split())
    return textwrap.fill(words, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def filled(text: str, known: Known) -> str:
    """`<run>` becomes its loss, `<run : base>` the gap of two losses in percent.

    Other losses of a run are `<train of run>` (its last batch), `<lowest of run>` (the least held-out loss of its
    curve) and `<second of run>` (on the second test set); `<sent of run>` and `<received of run>` are how many times
    fewer bytes. With `<?..>` a run may be missing.

    >>> known = Known({"a": {"finished": 3.0}, "b": {"finished": 2.0, "second_test": 4.0}})
    >>> filled("<a : b>, <a>, <second of b>, <?c>", known)
    '+50.0%, 3.0000, 4.0000, not run'
    """
    return re.sub(r"<([^<>]+)>", lambda found: _number(" ".join(found[1].split()), known), text)


def _number(words: str, known: Known) -> str:
    if words.startswith("?"):
        try:
            return _number(words[1:], known)
        except NotRun:
            return "not run"
    one, *base = words.split(" : ")
    if one.startswith(("sent of ", "received of ")):
        kind, _, run = one.partition(" of ")
        return f"{(known.fewer if kind == 'sent' else known.fewer_received)(run):,.0f}x"
    if not base:
        return f"{_loss(one, known):.4f}"
    gap = percent(_loss(one, known), _loss(base[0], known))
    return f"{gap:+.2f}%" if abs(gap) < 1 else f"{gap:+.1f}%"


def _loss(words: str, known: Known) -> float:
    kinds: dict[str, Callable[[str], float]] = {
        "train": lambda run: float(known.get(run)["curve"][-1]["train"]),
        "lowest": known.lowest,
        "second": lambda run: float(known.get(run)["second_test"]),
    }
    kind, of, run = words.partition(" of ")
    return kinds[kind](run) if of and kind in kinds else known.loss(words)
