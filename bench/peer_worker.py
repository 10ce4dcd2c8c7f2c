"""One worker of peers.py: a model at work with one library, told what to do by lines of JSON on standard input.

Every contender gets the same model, data, inner optimizer and number of steps. `inside` is what a library adds to a
step on the worker's own clock: the time in its hooks on the optimizer and in its own calls after the step. torch's DDP
works inside the backward pass; for it, and for ours beside it, `inside` is the step's time less that of the bare step.
`cpu` is the processor time of the whole process beyond that of the bare steps: other load hardly touches it.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import thinwire as tw
from thinwire.train.models import Llama, Shape

BATCH, CONTEXT = 1, 16  # little work a step: what is measured is the exchange
LR, MOMENTUM, MIX = 0.7, 0.9, 0.5
PATIENCE = datetime.timedelta(minutes=10)
SIZES = {
    "tiny": (Shape(4, 32, 2, 64), 64),
    "30M": (Shape(9, 512, 8, 1365), 4096),
    "124M": (Shape(12, 768, 12, 2048), 50257),
}


def model_of(size: str) -> Llama:
    shape, vocabulary = SIZES[size]
    torch.manual_seed(0)
    return Llama(shape, vocabulary, CONTEXT)


@dataclass(frozen=True)
class Place:
    """Where this worker is, and the length of a period."""

    worker: int
    workers: int
    host: str  # worker 0's address
    own: str
    port: int
    every: int

    @property
    def delay(self) -> int:
        """Steps that a fragment of two may be under way: the longest that torchft permits."""
        return self.every // 2 - 1

    def join_torch(self) -> None:
        store = f"tcp://{self.host}:{self.port}"
        dist.init_process_group("gloo", store, rank=self.worker, world_size=self.workers, timeout=PATIENCE)


class Trainee:
    """A model that takes steps; `pace` seconds of each are spent asleep, in its blocks, as if on an accelerator."""

    def __init__(self, size: str, pace: float) -> None:
        self.model = model_of(size)
        self.callable: nn.Module = self.model
        self.read(0)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.after: Callable[[], Any] = lambda: None
        self.started = self.stopped = 0.0
        self._slow_down(pace / len(self.model.model.layers))
        self.optimizer.register_step_post_hook(self._stop)  # the first of its kind: before those of any library
        self.begin()

    def read(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(self.model.vocabulary, (BATCH, CONTEXT + 1), generator=generator)

    def _slow_down(self, seconds: float) -> None:
        for block in self.model.model.layers if seconds else ():
            block.register_forward_pre_hook(lambda *_: time.sleep(seconds / 3))
            block.register_full_backward_hook(lambda *_: time.sleep(seconds * 2 / 3))

    def begin(self) -> None:
        """Have the clock start after every other hook: to be called once a library has put on its own."""
        raw = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's has the real one inside
        if hasattr(self, "_hook"):
            self._hook.remove()
        self._hook = raw.register_step_pre_hook(self._start)

    def _start(self, *_: Any) -> None:
        self.started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.stopped = time.perf_counter()

    def loss(self) -> Tensor:
        logits = self.callable(self.tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def step(self) -> dict[str, float]:
        began, busy = time.perf_counter(), time.process_time()
        self.loss().backward()
        called = time.perf_counter()
        self.optimizer.step()
        self.after()
        inside = self.started - called + time.perf_counter() - self.stopped
        self.optimizer.zero_grad()
        return {"wall": time.perf_counter() - began, "inside": inside, "cpu": time.process_time() - busy}


# -- the contenders ----------------------------------------------------------------------------------------------------


class Contender:
    """One library and method; `join` puts it on a trainee. `extra` steps of warm-up let a period end with a landing."""

    extra = 0
    equal = True  # whether workers hold the same parameters at the end of a period
    in_backward = False

    def join(self, trainee: Trainee, place: Place) -> None:
        raise NotImplementedError

    def rounds(self) -> int | None:
        """Rounds that were committed, where the library counts them."""
        return None


class Ours(Contender):
    def __init__(self, method: Callable[[Trainee, Place], tw.Method], extra: int = 0, equal: bool = True) -> None:
        self.method, self.extra, self.equal = method, extra, equal

    def join(self, trainee: Trainee, place: Place) -> None:
        address, patience = f"{place.host}:{place.port}", PATIENCE.total_seconds()
        line = tw.Group.connect(address, place.worker, place.workers, timeout=patience)
        self.fleet = tw.attach(trainee.model, trainee.optimizer, self.method(trainee, place), line)


def halves(model: Llama) -> list[nn.Module]:
    """Two fragments as torchft wants them, modules: each has half of the blocks, the second all else."""
    trunk = model.model
    middle = len(trunk.layers) // 2
    return [
        nn.ModuleList(trunk.layers[:middle]),
        nn.ModuleList([*trunk.layers[middle:], trunk.embed_tokens, trunk.norm]),
    ]


def named_halves(model: Llama) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in half.parameters()] for half in halves(model)]


def streaming(codec: Any) -> Callable[[Trainee, Place], tw.Method]:
    def method(trainee: Trainee, place: Place) -> tw.Method:
        fragments = named_halves(trainee.model)
        return tw.streaming_diloco(place.every, fragments, place.delay, MIX, LR, MOMENTUM, codec)

    return method


class TorchFT(Contender):
    """`torchft.local_sgd.DiLoCo` with a Manager; worker 0 has the lighthouse, every worker a store of its own."""

    def __init__(self, fragments: int) -> None:
        self.fragments, self.equal = fragments, fragments == 1

    def join(self, trainee: Trainee, place: Place) -> None:
        from torchft.local_sgd import DiLoCo

        self.manager = self._manager(place)
        parts = halves(trainee.model) if self.fragments == 2 else [trainee.model]
        outer = [torch.optim.SGD(part.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True) for part in parts]
        delay, mix = (place.delay, MIX) if self.fragments == 2 else (0, 0.0)
        DiLoCo(
            self.manager, parts, trainee.optimizer, outer, place.every,
            fragment_sync_delay=delay, fragment_update_alpha=mix,
        ).__enter__()  # fmt: skip

    def _manager(self, place: Place) -> Any:
        from torchft.coordination import LighthouseServer
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        if place.worker == 0:  # patient: on a slow line heartbeats queue behind the message
            self.lighthouse = LighthouseServer(
                bind=f"0.0.0.0:{place.port}",
                min_replicas=place.workers,
                quorum_tick_ms=10,
                heartbeat_timeout_ms=120_000,
            )
        self.store = dist.TCPStore(place.own, 0, is_master=True, wait_for_workers=False)
        return Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE), load_state_dict=lambda state: None, state_dict=dict,
            min_replica_size=place.workers, use_async_quorum=False, rank=0, world_size=1,
            timeout=PATIENCE, quorum_timeout=PATIENCE, connect_timeout=PATIENCE,
            store_addr=place.own, store_port=self.store.port, lighthouse_addr=f"http://{place.host}:{place.port}",
            replica_id=f"worker{place.worker}", hostname=place.own, init_sync=False,
        )  # fmt: skip

    def rounds(self) -> int:
        return int(self.manager.current_step())


class Accelerate(Contender):
    """`accelerate.local_sgd.LocalSGD`, in one world of DDP under `no_sync`."""

    def join(self, trainee: Trainee, place: Place) -> None:
        os.environ.update(MASTER_ADDR=place.host, MASTER_PORT=str(place.port))
        for name, number in (("", place.worker), ("LOCAL_", place.worker)):
            os.environ.update({f"{name}RANK": str(number), f"{name}WORLD_SIZE": str(place.workers)})
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        accelerator = Accelerator(cpu=True)
        trainee.callable, trainee.optimizer = accelerator.prepare(trainee.model, trainee.optimizer)
        self.context = ExitStack()
        local = self.context.enter_context(LocalSGD(accelerator, trainee.callable, place.every))
        trainee.after = local.step


class PostLocalSGD(Contender):
    """torch's `PeriodicModelAverager` behind DDP with the post-local SGD hook; it averages at the first step, too."""

    extra = 1

    def join(self, trainee: Trainee, place: Place) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        place.join_torch()
        wrapped = nn.parallel.DistributedDataParallel(trainee.model)
        state = hook.PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(state, hook.post_localSGD_hook)
        averager = PeriodicModelAverager(place.every)
        trainee.callable = wrapped
        trainee.after = lambda: averager.average_parameters(trainee.model.parameters())


class OurDDP(Ours):
    in_backward = True  # it works before the step; measured as its peer is


class DDP(Contender):
    in_backward = True

    def join(self, trainee: Trainee, place: Place) -> None:
        place.join_torch()
        trainee.callable = nn.parallel.DistributedDataParallel(trainee.model)


def contenders(every: int) -> dict[str, Contender]:
    landing = every // 2 - 1
    return {
        "thinwire diloco": Ours(lambda _, place: tw.diloco(place.every, LR, MOMENTUM)),
        "torchft diloco": TorchFT(1),
        "thinwire streaming": Ours(streaming(tw.Float32()), extra=landing, equal=False),
        "torchft streaming": TorchFT(2),
        "thinwire streaming E3M0": Ours(streaming(tw.E3M0()), extra=landing, equal=False),
        "thinwire local_sgd": Ours(lambda _, place: tw.local_sgd(place.every)),
        "accelerate LocalSGD": Accelerate(),
        "torch PostLocalSGD": PostLocalSGD(),
        "thinwire ddp": OurDDP(lambda *_: tw.ddp()),
        "torch DDP": DDP(),
    }


# -- doing as told -----------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, place: Place, name: str, size: str, pace: float) -> None:
        self.place, self.contender = place, contenders(place.every)[name]
        self.trainee = Trainee(size, pace)

    def ready(self, steps: int) -> dict[str, float]:
        return {}

    def bare(self, steps: int) -> dict[str, float]:
        """The step without any library, and the memory it takes; the first ones warm up.

        All workers read the same until they join, so that they start equal, their moments too.
        """
        taken = [self.trainee.step() for _ in range(steps + 2)][2:]
        self.bare_step = {key: statistics.median(step[key] for step in taken) for key in ("wall", "cpu")}
        return {"step": self.bare_step["wall"], "peak": peak_memory()}

    def join(self, steps: int) -> dict[str, float]:
        self.contender.join(self.trainee, self.place)
        self.trainee.begin()
        self.trainee.read(1 + self.place.worker)
        return self.take(steps + self.contender.extra)

    def take(self, steps: int) -> dict[str, float]:
        taken = [self.trainee.step() for _ in range(steps)]
        found = {key: sum(step[key] for step in taken) for key in ("wall", "inside", "cpu")}
        found["cpu"] -= steps * self.bare_step["cpu"]
        if self.contender.in_backward:
            found["inside"] = found["wall"] - steps * self.bare_step["wall"]
        return found

    def end(self, steps: int) -> dict[str, Any]:
        norm = sum(float(p.detach().double().norm()) for p in self.trainee.model.parameters())
        equal, rounds = self.contender.equal, self.contender.rounds()
        return {"peak": peak_memory(), "norm": norm, "equal": equal, "rounds": rounds}


def peak_memory() -> int:
    """The most that was ever resident, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    logging.getLogger("torchft").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    facts = json.loads(sys.argv[1])
    worker = Worker(Place(**facts["place"]), facts["contender"], facts["size"], facts["pace"])
    for line in sys.stdin:
        job, steps = json.loads(line)
        print(json.dumps(getattr(worker, job)(steps)), flush=True)
        if job == "end":
            break
    sys.stdin.readline()  # until everybody has said what it has: then the servers may go
    os._exit(0)  # torchft's have threads that would be waited for


if __name__ == "__main__":
    main()
