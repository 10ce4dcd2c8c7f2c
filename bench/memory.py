"""Extra memory at the peak: `tw.attach` against the same steps without it, beside what `tw.cost(...).memory()` says.

    python bench/memory.py                                                    # 100M parameters, two gloo processes, CPU
    python bench/memory.py --device cuda --parameters 1000000000 --workers 1  # 1B on a GPU, offload off and on

Every measurement is a fresh process that takes the same optimizer steps, with and without thinwire. On a CPU the peak
is the kernel's (resident memory, freed memory returned at once), on a GPU the allocator's; with offload the host's
peak is measured too. Expected: within 10%.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from results import machine, save, say, table
from torch import nn

import thinwire as tw

EVERY = 2
STEPS = 6 * EVERY + 2  # every row of every method has landed by then
LIMIT = 0.1


class Stack(nn.Module):
    """Equal square layers with about as many parameters as asked for."""

    def __init__(self, parameters: int, layers: int, device: str) -> None:
        super().__init__()
        width = round((parameters / layers) ** 0.5)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, device=device) for _ in range(layers))


def method_of(name: str, model: nn.Module) -> tw.Method:
    fragments = tw.by_layer(model, 4)
    return {
        "diloco": lambda: tw.diloco(EVERY),
        "desloc": lambda: tw.desloc(EVERY),
        "eager": lambda: tw.eager_diloco(EVERY),
        "carry": lambda: tw.carry_diloco(EVERY),
        "desloc, delay 1": lambda: tw.desloc(EVERY, delay=1),
        "desloc, outer": lambda: tw.desloc(EVERY, outer=tw.Nesterov(1.0, 0.9)),
        "streaming, E3M0": lambda: tw.streaming_diloco(4 * EVERY, fragments),
        "eager, E3M0": lambda: tw.eager_diloco(4 * EVERY, fragments, codec=tw.E3M0()),
        "sparseloco": lambda: tw.sparseloco(EVERY),
    }[name]()


METHODS = ["diloco", "desloc", "eager", "carry", "desloc, delay 1", "desloc, outer", "streaming, E3M0", "eager, E3M0"]


# -- one process -----------------------------------------------------------------------------------------------------


def serve(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = Stack(args.parameters, args.layers, args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()  # its state is there before anything is measured
    fleet = None
    forget_peak(args.device)
    if args.method != "none":
        transport = tw.Local()
        if args.workers > 1:
            transport = tw.Group.connect(f"127.0.0.1:{args.port}", args.worker, args.workers, timeout=600)
        fleet = tw.attach(model, optimizer, method_of(args.method, model), transport, offload=args.offload)
    for _ in range(2 * STEPS if "E3M0" in args.method else STEPS):
        optimizer.step()
    print(json.dumps(peak(args.device)), flush=True)
    if fleet is not None:
        fleet.drain()


def forget_peak(device: str) -> None:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts anew
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    found = {"host": int(kilobytes) * 1024}
    if device == "cuda":
        torch.cuda.synchronize()
        found["device"] = torch.cuda.max_memory_allocated()
    return found


# -- the parent ------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, method: str, offload: bool) -> dict[str, int]:
    """The largest peaks of the processes that run this method together."""
    say(f"{method}{', offload' if offload else ''}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = [sys.executable, __file__, *sys.argv[1:], "--method", method, "--port", str(port)]
    own += ["--offload"] if offload else []
    threshold = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}  # larger blocks go back to the kernel when freed
    environment = {**os.environ, **threshold, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*own, "--worker", str(i)], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(args.workers)
    ]
    try:
        peaks = [json.loads(process.communicate(timeout=1800)[0].strip().splitlines()[-1]) for process in started]
    finally:
        for process in started:
            process.kill()
    return {kind: max(found[kind] for found in peaks) for kind in peaks[0]}


def predict(args: argparse.Namespace, method: str, offload: bool) -> tuple[int, int]:
    model = Stack(args.parameters, args.layers, "meta")
    optimizer = torch.optim.AdamW(model.parameters())
    return tw.cost(method_of(method, model), model, args.workers, optimizer).memory(offload)


def compare(args: argparse.Namespace, base: dict[str, int], method: str, offload: bool) -> dict[str, Any]:
    found, (near, far) = measure(args, method, offload), predict(args, method, offload)
    near_kind = "device" if args.device == "cuda" else "host"
    result: dict[str, Any] = {"method": method, "offload": offload, "predicted": near}
    result["measured"] = found[near_kind] - base[near_kind]
    if offload:
        result |= {"host_predicted": far, "host_measured": found["host"] - base["host"]}
    return result


def show(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    whole = 4 * sum(p.numel() for p in Stack(args.parameters, args.layers, "meta").parameters())
    rows = []
    for found in results:
        ratio = found["measured"] / found["predicted"]
        host = (
            f"{found['host_measured'] / whole:.2f} / {found['host_predicted'] / whole:.2f}" if found["offload"] else ""
        )
        verdict = "" if abs(ratio - 1) <= LIMIT else "off"
        copies = f"{found['measured'] / whole:.2f}", f"{found['predicted'] / whole:.2f}"
        rows.append((found["method"], found["offload"], *copies, f"{ratio:.2f}", verdict, host))
    print(f"\nExtra memory at the peak, in copies of the fp32 model ({whole / 1e6:.0f} MB), {args.workers} worker(s)")
    table(("method", "offload", "measured", "predicted", "ratio", "over 10%", "host measured / predicted"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    for hidden in ("--worker", "--port"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    parser.add_argument("--offload", action="store_true", help=argparse.SUPPRESS)
    args, started = parser.parse_args(), machine()
    if args.worker is not None:
        return serve(args)
    base = measure(args, "none", offload=False)
    offloads = (False, True) if args.device == "cuda" else (False,)
    results = [compare(args, base, method, offload) for method in args.methods for offload in offloads]
    show(args, results)
    save(args.out, args.seed, {"baseline": base, "methods": results}, started)


if __name__ == "__main__":
    main()
