"""Work on a CPU shared out among threads, each of which keeps to one core.

A strip of a buffer that one core works on from beginning to end stays in that core's caches, and no thread waits for
another between two operations. Results do not depend on how many threads there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")


def share(items: Sequence[T], work: Callable[[Iterator[T]], None], device: torch.device) -> None:
    """`work` takes items until none is left: on a CPU in as many threads as torch may use, elsewhere in this one.

    >>> seen = []
    >>> share([1, 2, 3], seen.extend, torch.device("cpu"))
    >>> sorted(seen)
    [1, 2, 3]
    """
    left, threads = iter(items), torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or not items:
        return work(left)
    for done in [_crew(threads).submit(work, left) for _ in range(min(threads, len(items)))]:
        done.result()


@lru_cache(maxsize=1)
def _crew(threads: int) -> ThreadPoolExecutor:
    """So many threads, in each of which torch uses no others."""
    crew, all_there = ThreadPoolExecutor(threads, "thinwire-codec"), Barrier(threads)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first operation sets this to what is set for all; that is now done
        torch.set_num_threads(1)
        all_there.wait()

    for begun in [crew.submit(begin) for _ in range(threads)]:
        begun.result()
    torch.set_num_threads(threads)  # threads that start later take what was set last
    return crew


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads, and would wait for them
    os.register_at_fork(after_in_child=_crew.cache_clear)
