from collections.abc import Iterator

import pytest
import torch

from tests.cluster import Cluster

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also the tests that take half a minute each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test` stays short; `make test ARGS=--slow` runs everything."""
    if not config.getoption("--slow"):
        skipped = pytest.mark.skip(reason="takes long: --slow runs it")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skipped)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four processes that stay alive for a file of tests."""
    cluster = Cluster(4)
    yield cluster
    cluster.close()
