"""Many quality runs on one GPU within a time limit: several processes at once, resumable.

    python bench/evidence.py bench/runs/1_overlap.json bench/runs/2_compose.json --seconds 580 --out "$OUT"
    python bench/evidence.py --unpack results.jsonl        # into bench/results/quality, one file a run

Runs start in the order of the lists; one that is known (in bench/results/quality, or here from an earlier call) is
skipped, one that cannot end before the limit is passed over for a shorter one. Each finished run is written at once:
a file of its own in --here, and a line of results.jsonl in --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from quality import Run, best_rate, read_list

ROOT = Path(__file__).parents[1]
KNOWN = ROOT / "bench/results/quality"
START_UP = 20.0  # seconds from the start of a process to its first step
FIRST_GUESS = 2e6  # tokens a second, of all processes together, until a run has ended


def forward_passes(run: Run) -> float:
    """Tokens of a run, those of many small workers, of Muon and of a larger model counted as dearer."""
    size = {"35M": 2.5}.get(run.preset, 1.0)
    return run.steps * run.tokens * (1 + 0.04 * run.workers) * (1.2 if "muon" in run.optimizer else 1.0) * size


@dataclass
class Job:
    run: Run
    source: Path
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)


class Driver:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.waiting = [(run, path) for path in args.lists for run in read_list(path, **args.overrides)]
        self.waiting = [(run, path) for run, path in self.waiting if not self._known(run)]
        self.active: list[Job] = []
        self.rates: list[float] = []  # tokens a second of all processes together, as each finished run saw it
        self.compiled = not args.plain
        args.here.mkdir(parents=True, exist_ok=True)
        args.out.mkdir(parents=True, exist_ok=True)

    def _known(self, run: Run) -> bool:
        return (KNOWN / run.file).exists() or (self.args.here / run.file).exists()

    @property
    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.began)

    def _seconds_for(self, run: Run) -> float:
        """With the GPU shared by one process more than now; the first runs are a guess."""
        rate = statistics.median(self.rates) if self.rates else FIRST_GUESS
        return START_UP + forward_passes(run) * (len(self.active) + 1) / rate

    def _ready(self, run: Run) -> Run | None:
        """The run with its learning rate known, or None while the runs it depends on are under way."""
        if not isinstance(run.lr, str):
            return run
        prefix = run.lr.removeprefix("best of ")
        if any(other.name.startswith(prefix) and not other.seed for other in self._pending()):
            return None
        rate = best_rate(prefix, (KNOWN, self.args.here))
        if rate is None:
            raise ValueError(f"{run.name}: no finished run begins with {prefix!r}")
        return Run(**{**vars(run), "lr": rate})

    def _pending(self) -> list[Run]:
        return [job.run for job in self.active] + [run for run, _ in self.waiting]

    def _start_next(self) -> bool:
        for place, (run, source) in enumerate(self.waiting):
            ready = self._ready(run)
            if ready is not None and self._seconds_for(ready) < self.left:
                del self.waiting[place]
                self._start(ready, source)
                return True
        return False

    def _start(self, run: Run, source: Path) -> None:
        command = [sys.executable, "bench/quality.py", "--data", str(self.args.data), "--runs", str(source)]
        command += [
            "--name",
            run.name,
            "--lr",
            str(run.lr),
            "--out",
            str(self.args.here),
            "--held",
            str(self.args.held),
        ]
        command += ["--compiled"] if self.compiled else []
        command += [word for key, value in self.args.overrides.items() for word in (f"--{key}", str(value))]
        threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
        environment = {**os.environ, **threads, "PYTHONPATH": str(ROOT), "BESIDE": str(self.args.parallel)}
        log = (self.args.here / run.file).with_suffix(".log").open("wb")
        self.active.append(
            Job(run, source, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        )
        self._say(f"started {run.name}, lr {run.lr}")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)

    def _reap(self) -> None:
        for job in [job for job in self.active if job.process.poll() is not None]:
            self.active.remove(job)
            if (self.args.here / job.run.file).exists():
                self._finished(job)
            else:
                self._failed(job)

    def _finished(self, job: Job) -> None:
        results = json.loads((self.args.here / job.run.file).read_text())["results"]
        trained = time.monotonic() - job.started - min(START_UP, results["set_up_seconds"])
        self.rates.append(forward_passes(job.run) * (len(self.active) + 1) / trained)
        self._say(f"{job.run.name}: {results['finished']:.4f} (held {results['held']:.4f}), {results['seconds']:.0f} s")
        self._pack()

    def _failed(self, job: Job) -> None:
        """A first failure of compiled code turns compilation off for what follows, this run included."""
        tail = (self.args.here / job.run.file).with_suffix(".log").read_text(errors="replace")[-1500:]
        self._say(f"{job.run.name} FAILED:\n{tail}")
        if self.compiled and not self.rates:
            self._say("compilation is off from here on")
            self.compiled = False
        if "--compiled" in job.process.args and not self.compiled:  # type: ignore[operator]
            self.waiting.insert(0, (job.run, job.source))

    def _pack(self) -> None:
        """All that is known on this machine, in one file: not every way home takes many."""
        lines = [json.dumps(json.loads(path.read_text())) for path in sorted(self.args.here.glob("*.json"))]
        (self.args.out / "results.jsonl").write_text("".join(line + "\n" for line in lines))

    def work(self) -> None:
        while self.left > 0:
            while len(self.active) < self.args.parallel and self._start_next():
                pass
            if not self.active:
                break
            time.sleep(0.5)
            self._reap()
        for job in self.active:
            job.process.kill()
            job.process.wait()
        self._reap()
        self._pack()
        self._say("not run: " + (", ".join(run.name for run, _ in self.waiting) or "nothing"))


def unpack(path: Path) -> None:
    KNOWN.mkdir(parents=True, exist_ok=True)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        name = Run(**{key: record["results"][key] for key in ("name", "method", "workers")}).file
        (KNOWN / name).write_text(json.dumps(record, indent=1) + "\n")
        print(KNOWN / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", type=Path, nargs="*")
    parser.add_argument("--data", type=Path, default=Path("data/novels"))
    parser.add_argument("--here", type=Path, default=ROOT / "build/evidence", help="kept from one call to the next")
    parser.add_argument("--out", type=Path, default=ROOT / "build/evidence/out")
    parser.add_argument("--seconds", type=float, default=580)
    parser.add_argument("--parallel", type=int, default=5)
    parser.add_argument("--held", type=int, default=32)
    parser.add_argument("--plain", action="store_true", help="no torch.compile")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model, to see that all runs start")
    parser.add_argument("--unpack", type=Path)
    args = parser.parse_args()
    args.overrides = {"steps": 8, "tokens": 1024, "preset": "tiny", "context": 32} if args.smoke else {}
    unpack(args.unpack) if args.unpack else Driver(args).work()


if __name__ == "__main__":
    main()
