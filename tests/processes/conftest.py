from collections.abc import Iterator

import pytest

from tests.cluster import Cluster


@pytest.fixture(scope="session")
def six() -> Iterator[Cluster]:
    """Six processes: islands of one, two and three, or three workers of two."""
    cluster = Cluster(6)
    cluster.run(ready, 6, timeout=120, join=False)
    yield cluster
    cluster.close()


def ready(rank: int) -> None:
    import torch.distributed.fsdp  # noqa: F401 - takes seconds, which are not those of the first test
