"""Every file in examples/ runs, on two cores in less than a minute, and does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import free_port

pytestmark = pytest.mark.xdist_group("examples")
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
LIMIT = 240  # of a hang; on two quiet cores each takes less than half a minute
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(*commands: list[str]) -> list[str]:
    """What each of these programs prints, run at the same time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, text
    return said


def two_workers(name: str, *launcher: str, **options: str) -> list[str]:
    """The example as two programs, joined by `tw.Group.connect`; from each, the line that it ends with."""
    address = f"127.0.0.1:{free_port()}"
    extra = [word for key, value in options.items() for word in (f"--{key}", value)]
    start = [*(launcher or (sys.executable,)), str(EXAMPLES / name), "--connect", address, *extra]
    said = run([*start, "--worker", "0"], [*start, "--worker", "1"])
    return [re.findall(rf"worker {worker}: (.*)", text)[-1] for worker, text in enumerate(said)]


def test_torchrun_loop() -> None:
    (said,) = run([*TORCHRUN, "2", str(EXAMPLES / "torchrun_loop.py")])
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", said)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert float(re.findall(r"([\d.]+) times as much", said)[0]) > 8


def test_hf_trainer_in_two_torchruns(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    one, other = two_workers("hf_trainer.py", *TORCHRUN, "1", folder=str(tmp_path))
    assert one == other and float(one.removeprefix("loss ")) < 5


def test_lightning_trainer(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    one, other = two_workers("lightning_trainer.py", folder=str(tmp_path))
    assert one == other and float(re.findall(r"loss ([\d.]+)", one)[0]) < 0.2


@pytest.mark.parametrize(("name", "library"), [("fabric_loop.py", "lightning"), ("accelerate_loop.py", "accelerate")])
def test_loops_of_ones_own(name: str, library: str) -> None:
    pytest.importorskip(library)
    one, other = two_workers(name)
    assert one == other and "weights" in one


def test_lora_sends_the_adapters_and_no_more() -> None:
    pytest.importorskip("peft")
    one, other = two_workers("lora.py")
    sent, rounds, adapters, whole = (int(number) for number in re.findall(r"\d+", one))
    assert one == other and sent == rounds * adapters and adapters * 20 < whole


def test_fsdp2_mesh() -> None:
    (said,) = run([*TORCHRUN, "4", str(EXAMPLES / "fsdp2_mesh.py")])
    weights = re.findall(r"worker (\d), shard (\d): loss [\d.]+, weights (-?[\d.]+)", said)
    assert {(worker, shard) for worker, shard, _ in weights} == {(w, s) for w in "01" for s in "01"}
    assert len({weight for _, _, weight in weights}) == 1


def test_cnn() -> None:
    (said,) = run([*TORCHRUN, "2", str(EXAMPLES / "cnn.py")])
    found = dict(re.findall(r"(\w+): (\d+)% right", said))
    assert set(found) == {"diloco", "decoupled_momentum"} and all(int(right) > 50 for right in found.values())


def test_custom_method() -> None:
    (said,) = run([sys.executable, str(EXAMPLES / "custom_method.py")])
    assert "thrifty: 4 rows" in said and "Spring(pull=0.5)" in said
    assert all(float(loss) < 0.3 for loss in re.findall(r"loss (\d\.\d+)", said))


def test_elastic() -> None:
    pytest.importorskip("torchft")
    from thinwire.elastic.coordinator import Coordinator

    coordinator = Coordinator(port=free_port())
    start = [sys.executable, str(EXAMPLES / "elastic.py"), "--join", coordinator.address, "--min-workers", "2"]
    try:
        one, other = run(start, start)
    finally:
        coordinator.close()
    for said in (one, other):
        assert "step 200: loss" in said and "2 workers, 20 rounds" in said and "finished after 200 steps" in said


def test_every_example_is_run() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert path.name in tests, f"no test runs {path.name}"
