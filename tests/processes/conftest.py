from collections.abc import Iterator

import pytest

from tests.cluster import Cluster


@pytest.fixture(scope="module")
def six() -> Iterator[Cluster]:
    """Six processes: islands of one, two and three, or three workers of two."""
    cluster = Cluster(6)
    yield cluster
    cluster.close()
