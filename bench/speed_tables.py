"""The speed sections of docs/results.md, each from one raw file in bench/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).parent / "results"
Rows = list[list[str]]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@dataclass(frozen=True)
class Speed:
    """A table: the file it is from, how to measure it, what it says."""

    title: str
    file: str
    command: str
    text: str
    head: tuple[str, ...]
    rows: Callable[[Any], Rows]

    @property
    def missing(self) -> bool:
        return not (RESULTS / f"{self.file}.json").exists()

    def section(self) -> str:
        origin = f"Raw: `bench/results/{self.file}.json`; command: `{self.command}`"
        return f"## {self.title}\n\n{self.text} {origin}.\n\n{markdown(self.head, self.rows(read(self.file)))}"


def codecs(record: Any) -> Rows:
    by_codec: dict[str, dict[str, Any]] = {}
    for timing in record["timings"]:
        by_codec.setdefault(timing["what"], {})[timing["part"]] = timing
    parts = ("copy", "encode", "with residual", "decode", "merge of 4")
    return [
        [f"`{what}`", *(f"{t[part]['ms']:.2f} ({t[part]['times_copy']:.1f})" if part in t else "" for part in parts)]
        for what, t in by_codec.items()
    ]


def rounds(record: Any) -> Rows:
    return [
        [tensors, name, _quartiles(seconds["total"], 1000, 0), _over(found["ratios"], name, "total"),
         _quartiles(seconds["cpu"], 1000, 0), _over(found["ratios"], name, "cpu")]
        for tensors, found in record["results"]["round"].items()
        for name, seconds in found["seconds"].items()
    ]  # fmt: skip


def _quartiles(s: dict[str, float] | None, scale: float, digits: int) -> str:
    if s is None:
        return "not measured"
    low, middle, high = (f"{scale * s[key]:.{digits}f}" for key in ("low", "median", "high"))
    return f"{middle} ({low} .. {high})"


def _over(ratios: dict[str, Any], name: str, kind: str) -> str:
    return _quartiles(ratios[name][kind], 1, 2) if name in ratios else ""


def idle(record: Any) -> Rows:
    return [
        [method, f"{1e6 * found['hooks']['median']:.1f}", f"{found['ratio']:.5f}"]
        for method, found in record["results"]["idle"].items()
    ]


def memory(record: Any) -> Rows:
    return [
        [m["method"], "yes" if m["offload"] else "no", _gigabytes(m, ""), _gigabytes(m, "host_")]
        for m in record["results"]["methods"]
    ]


def _gigabytes(method: dict[str, Any], prefix: str) -> str:
    if f"{prefix}measured" not in method:
        return ""
    return f"{method[f'{prefix}measured'] / 1e9:.2f} / {method[f'{prefix}predicted'] / 1e9:.2f}"


def utilization(record: Any) -> Rows:
    rates = sorted({r["mbits"] for r in record["results"]})
    found: dict[str, dict[float, str]] = {}
    for r in record["results"]:
        found.setdefault(r["method"], {})[r["mbits"]] = f"{100 * r['utilization']:.1f} / {100 * r['planned']:.1f}"
    return [[method, *(cells.get(rate, "") for rate in rates)] for method, cells in found.items()]


def hosting(record: Any) -> Rows:
    return [
        [way, f"{r['hosting_ms']:.1f}", f"{r['one_model_ms']:.1f}", f"{r['ratio']:.2f}"]
        for way, r in record["results"].items()
    ]


def planned(record: Any) -> Rows:
    return [
        [r["method"], f"{r['mbits']:.0f}", f"{100 * r['measured']:.1f}%", f"{100 * r['predicted']:.1f}%",
         f"{r['ratio']:.3f}"]
        for r in record
    ]  # fmt: skip


def peers(record: Any) -> Rows:
    return [
        [each["contender"], str(each["workers"]), each["size"], each["line"], _quartiles(each["round"], 1000, 0),
         _quartiles(each["ours_over_it"]["round"], 1, 2) if each["ours_over_it"] else "",
         f"{each['waiting']['median']:.1%}" if each["waiting"] else "not measured",
         f"{each['bytes']['median'] / each['copy']:.3f}",
         f"{each['memory']['extra_copies']:.2f}"]
        for each in record["results"]["matches"]
    ]  # fmt: skip


def peer_tables() -> list[Speed]:
    """One for each recorded call of peers.py; where there is none, one that is missing."""
    names = [path.stem for path in sorted(RESULTS.glob("peers*.json"))]
    commands = {name: "sudo " + read(name)["command"] for name in names}
    return [
        Speed(f"Each peer's round beside ours ({name})", name, commands.get(name, "sudo python bench/peers.py"), _PEERS,
              ("contender", "workers", "size", "line", "round ms", "ours over it", "waiting", "sent, copies",
               "extra memory, copies"), peers)
        for name in names or ["peers"]
    ]  # fmt: skip


def processes(record: Any) -> Rows:
    if "processes" not in record["results"]:
        return [["not run", "", "", "", ""]]
    return [
        [str(each["processes"]), _quartiles(each["round"], 1000, 1), _quartiles(each["all_reduce"], 1000, 1),
         _quartiles(each["ratio"], 1, 2), f"{each['bytes']['median'] / each['message']:.3f}"]
        for each in record["results"]["processes"]
    ]  # fmt: skip


def tensors(record: Any) -> Rows:
    return [
        [f"{each['parameters']:,}", f"{each['tensors']:,}", _quartiles(each["engine"], 1000, 1),
         _quartiles(each["bare"], 1000, 1), _quartiles(each["ratio"], 1, 2)]
        for each in record["results"]["tensors"]
    ]  # fmt: skip


def tensors_on_a_gpu(record: Any) -> Rows:
    places = [each["offload"] for each in record["results"]["tensors"]]
    return [["host" if away else "GPU", *row] for away, row in zip(places, tensors(record), strict=True)]


def images(record: Any) -> Rows:
    """A row a method; of each number of workers, the mean over the seeds."""
    runs = record["results"]["runs"]
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        found.setdefault(run["method"], {}).setdefault(run["workers"], []).append(run)
    return [[name, *(_accuracy(by_workers.get(m, [])) for m in (2, 4, 8))] for name, by_workers in found.items()]


def _accuracy(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "not run"
    loss, accuracy = (fmean(run[key] for run in runs) for key in ("loss", "accuracy"))
    return f"{loss:.3f} ({accuracy:.1%}), {runs[0]['bytes_sent'] / 1e6:,.2f} MB"


_PEERS = (
    "What a period takes beyond its steps, what share of the period that is, what the kernel counted as sent and the"
    " peak of memory beyond that of bare steps, in fp32 copies of the model; lines in Mbit/s."
)
_ROUND = "wall ms", "ours over it", "processor ms", "ours over it"
_LINES = "10 Mbit/s", "60 Mbit/s", "200 Mbit/s", "1,000 Mbit/s"
_BUSY = "Percent of the time in which {} workers compute, measured / planned, on shaped lines; above 100 is noise."
_MEMORY = "What a method adds at its peak, measured / predicted by `tw.cost`, in GB;"

_IMAGES = (
    " images a step over all workers, AdamW with a cosine, one rate for all. Loss on the test images (accuracy), of"
    " what `fleet.consensus()` gives, and what a worker sent."
)
RESNET = Speed(
    "A ResNet-20 on Fashion-MNIST", "resnet_fashion",
    "python bench/quality_resnet.py --data data/fashion --out bench/results/resnet_fashion.json",
    "2,048 steps of 256" + _IMAGES, ("method", "2 workers", "4 workers", "8 workers"), images,
)  # fmt: skip
SMALL_RESNET = Speed(
    "On a CPU: a ResNet-8 on Fashion-MNIST", "resnet_fashion_small",
    "python bench/quality_resnet.py --data data/fashion --blocks 1 --images 128 --steps 1536 --parallel 1"
    " --out bench/results/resnet_fashion_small.json",
    "1,536 steps of 128" + _IMAGES, ("method", "2 workers", "4 workers", "8 workers"), images,
)  # fmt: skip

SPEED = peer_tables() + [
    Speed("A round on more processes", "scaling", "sudo python bench/scaling.py --parts processes",
          "A DiLoCo round of 1M parameters on one machine of two cores, beside one raw all-reduce of the same bytes.",
          ("processes", "round ms", "all-reduce ms", "ratio", "sent, copies"), processes),
    Speed("The engine on more tensors", "scaling", "python bench/scaling.py --parts tensors",
          "Two replicas in one process, beside a loop over the tensors that does the same arithmetic.",
          ("parameters", "tensors", "engine ms", "bare loop ms", "ratio"), tensors),
    *(
        Speed(f"The engine on a GPU, {size}", file,
              f"python bench/scaling.py --parts tensors --device cuda --tensors {counts} --parameters {parameters}"
              " --rounds 9",
              "The same on one H200, with the outer state there or on the host (`offload=True`), wall time.",
              ("outer state", "parameters", "tensors", "engine ms", "bare loop ms", "ratio"), tensors_on_a_gpu)
        for size, file, counts, parameters in (
            ("100M parameters", "scaling_cuda", "10 100 1000", 100_000_000),
            ("1B parameters", "scaling_cuda_1b", "10 1000", 1_000_000_000),
        )
    ),
    Speed("Codecs on two cores", "codecs_cpu", "OMP_NUM_THREADS=2 python bench/codecs.py --device cpu --only DCT",
          "124M parameters in GPT-2's shapes: milliseconds, and times a plain copy.",
          ("codec", "copy", "encode", "encode with residual", "decode", "merge of four"), codecs),
    Speed("Codecs on a GPU", "codecs_cuda", "python bench/codecs.py --device cuda",
          "124M parameters in GPT-2's shapes, one H200: milliseconds, and times a plain copy.",
          ("codec", "copy", "encode", "encode with residual", "decode", "merge of four"), codecs),
    Speed("A round", "overhead", "python bench/overhead.py",
          "A DiLoCo round of 30M parameters on two gloo processes, one thread each, on an idle machine.",
          ("tensors", "variant", *_ROUND), rounds),
    Speed("A step on which nothing is due", "overhead", "python bench/overhead.py --parts idle",
          "What the hooks of 30M parameters cost in a step of AdamW.",
          ("method", "microseconds in hooks", "step with hooks over step without"), idle),
    Speed("Memory, 100M parameters on a CPU", "memory", "python bench/memory.py",
          f"{_MEMORY} the fp32 model is .4 GB.", ("method", "offload", "added", "on the host"), memory),
    Speed("Memory, 1B parameters on an H200", "memory_cuda",
          "python bench/memory.py --device cuda --parameters 1000000000 --workers 1 --methods diloco desloc eager",
          f"{_MEMORY} the fp32 model is 4 GB.", ("method", "offload", "added on the GPU", "on the host"), memory),
    Speed("Overlap on slow lines, two workers", "overlap_2", "sudo python bench/overlap.py --workers 2",
          _BUSY.format("two"), ("method", *_LINES), utilization),
    Speed("Overlap on slow lines, four workers", "overlap_4",
          "sudo python bench/overlap.py --workers 4 --rates 60 200 1000",
          _BUSY.format("four"), ("method", *_LINES), utilization),
    Speed("The planner against real runs", "plan_vs_real", "sudo python bench/plan_vs_real.py",
          "Utilization of two gloo workers on shaped lines; planned with the planner's own overheads.",
          ("method", "Mbit/s", "measured", "planned", "planned over measured"), planned),
    Speed("Hosting four replicas on one GPU", "simulate_cuda",
          "python bench/simulate.py --device cuda --preset 12M --batch 16 --context 256 --precision bf16 --steps 140",
          "Four replicas with DES-LOC against one model on the same tokens, milliseconds a step.",
          ("how", "four replicas", "one model", "ratio"), hosting),
    Speed("Hosting replicas on two cores", "simulate_cpu",
          "OMP_NUM_THREADS=2 python bench/simulate.py --workers 2 4 8 16",
          "Replicas of 1M parameters with DES-LOC against one model on the same tokens, milliseconds a step.",
          ("hosted", "they", "one model", "ratio"), hosting),
]  # fmt: skip
