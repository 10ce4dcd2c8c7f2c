"""A worker of torchft with our healing and nothing else of thinwire: its ports, and whether its rounds go on.

    python -m tests.elastic.plain_worker LIGHTHOUSE NAME

The first line on standard output is JSON with its ports; then one line a round.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

from thinwire.elastic.healing import Healing

PATIENCE = timedelta(seconds=10)


def main(lighthouse: str, name: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    healing = Healing(None)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=lambda state: None,
        state_dict=lambda: {"weights": torch.ones(3)},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{lighthouse}",
        replica_id=name,
        hostname="127.0.0.1",
        checkpoint_transport=healing,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
    )
    assert manager._manager is not None
    ports = {"store": store.port, "healing": _port(healing.metadata()), "manager": _port(manager._manager.address())}
    print(json.dumps(ports), flush=True)
    while True:
        manager.start_quorum()
        numbers = torch.ones(4)
        manager.allreduce(numbers).wait()
        round_ = {"committed": manager.should_commit(), "workers": manager.num_participants()}
        print(json.dumps(round_ | {"step": manager.current_step()}), flush=True)
        time.sleep(0.1)


def _port(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
