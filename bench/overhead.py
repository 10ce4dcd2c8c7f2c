"""What thinwire itself costs: steps on which nothing is due, and a DiLoCo round against its parts done bare.

    python bench/overhead.py                          # all, about five minutes on two cores
    python bench/overhead.py --parts idle             # only the steps on which nothing is due
    python bench/overhead.py --parts round --tensors 100 --rounds 30 --profile 5

The round runs on two gloo processes on this machine, one torch thread each. All variants take turns within one run and
every ratio is of neighbours in time, so that other load hits both alike; medians and quartiles are shown. Beside wall
time stands the processor time of the process, its gloo threads included: other load hardly touches it.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import logging
import os
import pstats
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from results import machine, save, say, spread, table
from torch import nn

import thinwire as tw

LR, MOMENTUM = 0.7, 0.9
LIMITS = {"idle": 1.01, "parts": 1.2, "torchft": 0.6}


class Pile(nn.Module):
    """As many parameters as asked for, in `tensors` equal matrices (to a row of 100)."""

    def __init__(self, parameters: int, tensors: int) -> None:
        super().__init__()
        rows = max(1, parameters // tensors // 100)
        self.weights = nn.ParameterList(torch.randn(rows, 100) for _ in range(tensors))


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# -- steps on which nothing is due -----------------------------------------------------------------------------------


def idle(args: argparse.Namespace) -> dict[str, Any]:
    """The optimizer's step with and without hooks, in turn; and the hooks alone, which the difference drowns."""
    model = Pile(args.parameters, args.idle_tensors)
    found = {}
    for name, method in idle_methods(model).items():
        say(f"nothing due: {name}")
        found[name] = idle_of(model, method, args.rounds)
    return found


def idle_methods(model: nn.Module) -> dict[str, tw.Method]:
    names = [name for name, _ in model.named_parameters()]
    fragments = [names[i::4] for i in range(4)]
    never = 10**9
    return {
        "diloco": tw.diloco(never),
        "desloc": tw.desloc(never),
        "streaming_diloco, 4 fragments": tw.streaming_diloco(never, fragments),
        "eager_diloco, 4 fragments": tw.eager_diloco(never, fragments),
    }


def idle_of(model: nn.Module, method: tw.Method, rounds: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    fleet = tw.attach(model, optimizer, method, tw.Local())
    optimizer.step()
    bare, ours, hooks = [], [], []
    for _ in range(rounds):
        ours.append(timed(optimizer.step))
        hooks.append(timed(lambda: many(fleet, 100)) / 100)
        fleet_hooks, fleet._hooks = fleet._hooks, []
        pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = type(pre)(), type(post)()
        bare.append(timed(optimizer.step))
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = pre, post
        fleet._hooks = fleet_hooks
    fleet.detach()
    measured = spread(o / b for o, b in zip(ours, bare, strict=True))
    floor = 1 + spread(hooks)["median"] / spread(bare)["median"]
    return {"bare": spread(bare), "with_hooks": spread(ours), "hooks": spread(hooks), "ratio": floor, "noisy": measured}


def many(fleet: tw.Fleet, count: int) -> None:
    for _ in range(count):
        fleet.before_step()
        fleet.after_step()


# -- a round, on two processes -----------------------------------------------------------------------------------------


class Variant(Protocol):
    """One way to make a DiLoCo round; `go` returns its seconds and those of its pieces."""

    def perturb(self) -> None: ...

    def go(self) -> dict[str, float]: ...


class Ours:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.fleet = tw.Fleet([tw.Replica(model, optimizer)], tw.diloco(1, LR, MOMENTUM), tw.Group())

    @torch.no_grad()
    def perturb(self) -> None:
        torch._foreach_mul_(list(self.model.parameters()), 0.999)

    def round(self) -> None:
        self.fleet.before_step()
        self.fleet.after_step()

    def go(self) -> dict[str, float]:
        return {"total": timed(self.round)}


class Parts:
    """One subtraction, one raw all-reduce of the same bytes, one Nesterov step, each on one flat tensor."""

    def __init__(self, parameters: int) -> None:
        self.x = torch.randn(parameters)
        self.anchor = nn.Parameter(self.x.clone())
        self.anchor.grad = torch.zeros(parameters)
        self.optimizer = torch.optim.SGD([self.anchor], lr=LR, momentum=MOMENTUM, nesterov=True)

    def perturb(self) -> None:
        self.x.mul_(0.999)

    def go(self) -> dict[str, float]:
        drift = self.anchor.grad
        assert drift is not None
        found = {
            "subtract": timed(lambda: torch.sub(self.anchor.detach(), self.x, out=drift)),
            "all_reduce": timed(lambda: dist.all_reduce(drift)),
            "step": timed(self.optimizer.step),
        }
        return {"total": sum(found.values()), **found}


class TorchFT:
    """`torchft.local_sgd.DiLoCo`, every step a round; the inner optimizer has no gradients and does nothing."""

    def __init__(self, model: nn.Module, rank: int, buckets: bool) -> None:
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        self.model, self.quorum = model, 0.0
        self.lighthouse, address = lighthouse_of(rank)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=60)),
            load_state_dict=lambda state: None, state_dict=dict, min_replica_size=2, use_async_quorum=False,
            rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=address,
            replica_id=f"bench{buckets:d}_{rank}", hostname="127.0.0.1", init_sync=False,
        )  # fmt: skip
        self.store = store
        self.inner = torch.optim.SGD(model.parameters(), lr=0.0)
        outer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
        DiLoCo(self.manager, [model], self.inner, outer, sync_every=1, use_bucketization=buckets).__enter__()
        self.start_quorum = self.manager.start_quorum
        self.manager.start_quorum = self.timed_quorum  # type: ignore[method-assign]

    def timed_quorum(self, *args: Any, **kwargs: Any) -> None:
        self.quorum = timed(lambda: self.start_quorum(*args, **kwargs))

    perturb = Ours.perturb

    def go(self) -> dict[str, float]:
        before = self.manager.current_step()
        total = timed(self.inner.step)
        assert self.manager.current_step() == before + 1, "torchft did not commit the round"
        return {"total": total, "quorum": self.quorum}


def lighthouse_of(rank: int) -> tuple[Any, str]:
    """A lighthouse in process 0, and its address. It waits for every replica it knows, so each variant has its own."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, quorum_tick_ms=10) if rank == 0 else None
    said = [server.address() if server else None]
    dist.broadcast_object_list(said, 0)
    return server, f"http://127.0.0.1:{str(said[0]).rsplit(':', 1)[1]}"


def missing_torchft() -> str | None:
    try:
        import torchft.local_sgd  # noqa: F401
    except ImportError as error:
        return f"skipped: torchft cannot be imported ({error})"
    return None


def serve(args: argparse.Namespace) -> None:
    """One of the two processes; the first one prints the findings."""
    logging.getLogger("torchft").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    store = f"tcp://127.0.0.1:{args.port}"
    dist.init_process_group("gloo", init_method=store, rank=args.worker, world_size=2)
    found: dict[str, Any] = {}
    for tensors in args.tensors:
        found[str(tensors)] = compare(args, tensors)
    if args.worker == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)  # torchft's servers have threads that would be waited for


def compare(args: argparse.Namespace, tensors: int) -> dict[str, Any]:
    variants, skipped = variants_of(args, tensors)
    taken: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(args.rounds + 2):
        for name, variant in variants.items():
            taken[name].append(one_round(variant))
        if args.worker == 0 and number % 10 == 0:
            say(f"{tensors} tensors: round {number} of {args.rounds + 2}")
    rounds = {name: together(values[2:]) for name, values in taken.items()}  # the first two warm up
    summary = summarise(rounds)
    ours = variants["thinwire"]
    assert isinstance(ours, Ours)
    summary["profile"] = profile(ours, args.profile)
    for variant in variants.values():
        if isinstance(variant, TorchFT):
            variant.manager.shutdown()
    return summary | skipped


def variants_of(args: argparse.Namespace, tensors: int) -> tuple[Any, Any]:
    variants: dict[str, Variant] = {
        "thinwire": Ours(Pile(args.parameters, tensors)),
        "parts": Parts(args.parameters // tensors // 100 * 100 * tensors),
    }
    if (reason := missing_torchft()) is not None:
        return variants, {"torchft": reason}
    for name, buckets in (("torchft", False), ("torchft, buckets", True)):
        variants[name] = TorchFT(Pile(args.parameters, tensors), args.worker, buckets)
    return variants, {}


def one_round(variant: Variant) -> dict[str, float]:
    variant.perturb()
    dist.barrier()
    busy = time.process_time()
    found = variant.go()
    return {**found, "cpu": time.process_time() - busy}


def together(mine: list[dict[str, float]]) -> list[dict[str, float]]:
    """Of both processes the slower, number by number."""
    heard: list[Any] = [None, None]
    dist.all_gather_object(heard, mine)
    return [{key: max(a[key], b[key]) for key in a} for a, b in zip(*heard, strict=True)]


def summarise(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    seconds = {n: {key: spread(r[key] for r in values) for key in values[0]} for n, values in rounds.items()}
    ratios = {}
    for name, values in rounds.items():
        if name != "thinwire":
            pairs = list(zip(rounds["thinwire"], values, strict=True))
            ratios[name] = {key: spread(ours[key] / theirs[key] for ours, theirs in pairs) for key in ("total", "cpu")}
    return {"seconds": seconds, "ratios": ratios}


def profile(ours: Ours, rounds: int) -> dict[str, float]:
    """Seconds a round in each of thinwire's functions, the library calls it makes itself included."""
    if not rounds:
        return {}
    profiler = cProfile.Profile()
    for _ in range(rounds):
        ours.perturb()
        dist.barrier()
        profiler.runcall(ours.round)
    owned: dict[str, float] = defaultdict(float)
    for key, (_, _, own, _, callers) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if "thinwire" in key[0]:
            owned[_title(key)] += own / rounds
        for caller, (_, _, inside, _) in callers.items():
            if "thinwire" in caller[0] and key[0] == "~":
                owned[_title(caller)] += inside / rounds
    return dict(sorted(owned.items(), key=lambda item: -item[1])[:14])


def _title(key: tuple[str, int, str]) -> str:
    return f"{Path(key[0]).stem}.{key[2]}"


def rounds_on_two(args: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--port", str(port)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHFT_LOG": "",
        "RUST_LOG": "error",
    }
    started = [
        subprocess.Popen([*command, "--worker", str(i)], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        out = [process.communicate(timeout=3600)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise SystemExit("a worker failed; its message is above")
    return dict(json.loads(out[0].strip().splitlines()[-1]))


# -- what is shown ---------------------------------------------------------------------------------------------------


def milliseconds(found: dict[str, float]) -> str:
    return f"{1e3 * found['median']:.1f} ({1e3 * found['low']:.1f} .. {1e3 * found['high']:.1f})"


def ratio_text(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} .. {found['high']:.2f})"


def show_idle(found: dict[str, Any]) -> None:
    print(f"\nA step on which nothing is due, against the bare AdamW step (at most {LIMITS['idle']})")
    rows = [
        (
            name,
            milliseconds(f["bare"]),
            f"{1e6 * f['hooks']['median']:.0f}",
            f"{f['ratio']:.5f}",
            ratio_text(f["noisy"]),
        )
        for name, f in found.items()
    ]
    table(("method", "bare ms", "hooks us", "1 + hooks/bare", "measured, noise and all"), rows)


def round_row(tensors: str, name: str, result: dict[str, Any]) -> tuple[str, ...]:
    seconds, ratios = result["seconds"][name], result["ratios"].get(name)
    wall, busy = (ratio_text(ratios[key]) if ratios else "" for key in ("total", "cpu"))
    pieces = ", ".join(f"{k} {1e3 * v['median']:.0f}" for k, v in seconds.items() if k not in ("total", "cpu"))
    return name, tensors, milliseconds(seconds["total"]), wall, milliseconds(seconds["cpu"]), busy, pieces


def show_rounds(found: dict[str, Any]) -> None:
    limits = f"at most {LIMITS['parts']} over the parts, {LIMITS['torchft']} over torchft"
    print(f"\nA DiLoCo round on two gloo processes, ms; {limits}")
    rows = []
    for tensors, result in found.items():
        rows += [round_row(tensors, name, result) for name in result["seconds"]]
        if isinstance(result.get("torchft"), str):
            rows.append(("torchft", tensors, "-", "-", "-", "-", result["torchft"]))
    head = (
        "variant",
        "tensors",
        "wall ms",
        "thinwire over it",
        "processor ms",
        "thinwire over it",
        "of which, wall ms",
    )
    table(head, rows)
    for tensors, result in found.items():
        print(f"\nWhere thinwire's time goes, {tensors} tensors, ms a round")
        table(("function", "ms"), [(name, f"{1e3 * s:.1f}") for name, s in result["profile"].items()])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("idle", "round"), default=["idle", "round"])
    parser.add_argument("--parameters", type=int, default=30_000_000)
    parser.add_argument("--tensors", type=int, nargs="+", default=[10, 100, 1000], help="of the model in a round")
    parser.add_argument("--idle-tensors", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", type=int, default=5, help="rounds under the profiler, after the timed ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args, started = parsed(), machine()
    if args.worker is not None:
        return serve(args)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if "idle" in args.parts:
        found["idle"] = idle(args)
        show_idle(found["idle"])
    if "round" in args.parts:
        found["round"] = rounds_on_two(args)
        show_rounds(found["round"])
    save(args.out, args.seed, found, started)


if __name__ == "__main__":
    main()
