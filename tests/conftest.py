from collections.abc import Iterator

import pytest
import torch

from tests.cluster import Cluster

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four processes that stay alive for the whole session."""
    cluster = Cluster(4)
    yield cluster
    cluster.close()
