"""The real command line; in processes of its own where what a process does is the question."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from thinwire.cli import app
from thinwire.plan.__main__ import main
from thinwire.plan.advisor import settings
from thinwire.train.config import load
from thinwire.train.methods import resolved_method

ASK = ["--params", "120e6", "--layers", "12", "--step-time", "1.2", "--workers", "4", "--latency", "30ms"]
LINE = ["--bandwidth", "100Mbit"]


def run(*arguments, check=True, program=("-m", "thinwire.plan")):
    done = subprocess.run([sys.executable, *program, *arguments], capture_output=True, text=True, timeout=240)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture
def ask(capsys):
    """The command called in this process: what it writes to standard output."""

    def call(*arguments):
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    return call


def test_paper_tables_as_json_and_nothing_else(ask):
    answer = json.loads(ask("--paper-tables", "--json"))
    assert answer["total"] == len(answer["cells"]) == 120
    assert answer["matched"] == sum(cell["ours"] == cell["published"] for cell in answer["cells"]) >= 117
    assert set(answer["cells"][0]) >= {"method", "size", "target", "published", "ours"}
    assert len(answer["out_of_sample"]) == 25


def test_paper_tables_in_words(ask):
    text = ask("--paper-tables")
    assert "117 of 120" in text and "Out of sample" in text and "long run" in text


def test_rows_as_json_and_nothing_else():
    done = run(*ASK, *LINE, "--json")
    rows = json.loads(done.stdout)
    assert {"ddp", "diloco", "streaming_diloco", "eager_diloco", "desloc"} <= {row["method"] for row in rows}
    assert all({"every", "utilization", "bytes_per_step"} <= set(row) for row in rows)
    assert done.stderr == ""


def test_an_answer_in_words_ends_with_a_command(ask):
    text = ask(*ASK, "--bandwidth", "40Mbit/200Mbit", "--gpu-memory", "80GB", "--ram", "1TB", "--mtbf", "12h")
    assert "Recommended: " in text and text.rstrip().splitlines()[-1].strip().startswith("thinwire train CONFIG.toml ")
    assert "arXiv" in text and "Goodput" in text


@pytest.fixture
def on_terminal(ask, monkeypatch):
    """The lines of an answer on a terminal of so many columns, without colours."""

    def call(columns, *arguments):
        monkeypatch.setenv("FORCE_COLOR", "1")  # what a pipe is asked with, to be taken for a terminal
        monkeypatch.setenv("COLUMNS", str(columns))
        return re.sub(r"\x1b\[[0-9;]*m", "", ask(*arguments)).splitlines()

    return call


@pytest.mark.parametrize("columns", [40, 60, 80, 160])
def test_the_table_fits_the_terminal_and_cuts_nothing(on_terminal, columns):
    lines = on_terminal(columns, *ASK, *LINE, "--mtbf", "12h")
    table = [line for line in lines if line[:1] in "┃│┏└"]
    assert table and max(map(len, table)) <= columns and "…" not in "".join(lines)
    assert any(re.match(r"│ decoupled_momentum │ .* \d+\.\d% │$", line) for line in table), "its name and its loss"
    assert any(line.startswith("Left out") for line in lines) == (columns < 160)


@pytest.mark.parametrize(("columns", "kinds"), [(40, 1), (50, 2), (60, 3)])
def test_goodput_of_a_narrow_terminal_leaves_kinds_of_round_out(on_terminal, columns, kinds):
    lines = on_terminal(columns, *ASK, *LINE, "--mtbf", "12h")
    goodput = lines[lines.index("Goodput under failures and stragglers, by kind of round") :]
    ddp = next(line for line in goodput if line.startswith("│ ddp"))
    assert len(re.findall(r" \d+\.\d% │", ddp)) == kinds
    assert ("Left out, as the terminal is narrow: eager, quorum." in goodput) == (columns == 40)


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_the_papers_tables_fit_the_terminal_and_cut_nothing(on_terminal, columns):
    lines = on_terminal(columns, "--paper-tables")
    table = [line for line in lines if line[:1] in "┃│┏└"]
    assert max(map(len, table)) <= columns and "…" not in "".join(lines)
    assert sum("390.7 | 390.7" in line for line in table), "both numbers of a cell"
    assert columns > 80 or "│ (eager), FP4, H=100" in "".join(table), "a long name takes two lines"


def test_one_worker_is_told_that_it_exchanges_nothing(ask):
    text = ask(*ASK, *LINE, "--workers", "1")
    assert "One worker exchanges nothing" in text and "Recommended" not in text


def test_less_loss_than_ddp_has_one_sign(ask):
    text = ask(*ASK, "--params", "1e9", "--bandwidth", "10Gbit", "--workers", "2")
    assert "expected loss -0.4%" in text and "+-" not in text


@pytest.mark.parametrize("option", ["--gpu-memory", "--ram"])
def test_a_size_without_its_unit_is_refused_with_what_to_write(capsys, option):
    assert main([*ASK, *LINE, option, "80"]) == 2
    assert f"{option} 80 is 80 B: write the unit as well, for example 80GB" in capsys.readouterr().err


def test_unequal_machines_are_told_their_batches(ask):
    text = ask(*ASK, *LINE, "--step-time", "1s,1s,2s,4s", "--batch-tokens", "1000")
    assert "worker 3: 364" in text


def test_unequal_machines_are_named_as_what_keeps_them_from_being_busy(ask):
    line = ["--params", "350M", "--layers", "24", "--bandwidth", "1000Gbit", "--workers", "2"]
    text = ask(*line, "--step-time", "1.2s,0.8s")
    assert "Recommended: ddp" in text
    assert "% busy (their unequal steps allow 83%: take the batches above)" in text and "nothing here" not in text


@pytest.mark.parametrize(("steps", "goal"), [("1s", "90%"), ("1.2s,0.8s", "90% of the 83% that unequal steps allow")])
def test_a_line_too_thin_for_every_method_is_named(ask, steps, goal):
    line = ["--params", "7e9", "--layers", "24", "--bandwidth", "100kbit", "--workers", "2"]
    assert f"(nothing here reaches {goal} on this line)" in ask(*line, "--step-time", steps)


def test_the_same_under_the_main_command():
    done = run("plan", *ASK, *LINE, "--json", program=("-m", "thinwire"))
    assert json.loads(done.stdout)


@pytest.mark.parametrize("name", ["curve.html", "curve.png"])
def test_a_picture(tmp_path, ask, name):
    ask(*ASK, *LINE, "--json", "--plot", str(tmp_path / name))
    data = (tmp_path / name).read_bytes()
    if name.endswith(".png"):
        assert data.startswith(b"\x89PNG")
    else:
        assert b"eager_diloco" in data and b"https://cdn" not in data[:1000]


def test_a_run_directory(tmp_path, ask):
    (tmp_path / "config.toml").write_text(
        "parameters = 1_000_000\nworkers = 2\n[model]\nlayers = 4\ncontext = 128\n[train]\nbatch = 8\naccumulate = 2\n"
    )
    lines = [json.dumps({"step": step, "compute_seconds": 0.25}) for step in range(1, 20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 20, "comp')
    rows = json.loads(ask("--run", str(tmp_path), *LINE, "--tokens", "4096000", "--json"))
    ddp = next(row for row in rows if row["method"] == "ddp")
    assert ddp["seconds"] == pytest.approx(1000 * 0.25 / ddp["utilization"])
    assert ddp["bytes_per_step"] == 4_000_000


def test_an_elastic_run_is_planned_for_the_workers_that_came(tmp_path, ask):
    """Its config has the number that a run without `--join` would have: who came is in the metrics."""
    (tmp_path / "config.toml").write_text("parameters = 1_000_000\nworkers = 4\n[model]\nlayers = 4\n")
    came = [1, 2, 2, 2, 3, 1]
    lines = [
        json.dumps({"step": step, "compute_seconds": 0.1, "workers": n, "committed": step})
        for step, n in enumerate(came)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert all(
        " --workers 2 " in f"{row['command']} " for row in json.loads(ask("--run", str(tmp_path), *LINE, "--json"))
    )
    told = json.loads(ask("--run", str(tmp_path), *LINE, "--workers", "3", "--json"))
    assert all(" --workers 3 " in f"{row['command']} " for row in told)


def test_the_tokens_of_a_runs_step_are_those_that_it_counted(tmp_path, ask):
    """Images count as one, whatever the context; here 64 a step of two workers."""
    text = "parameters = 1_000\nworkers = 2\n[model]\ncontext = 128\n[train]\nbatch = 32\naccumulate = 1\n"
    (tmp_path / "config.toml").write_text(text)
    lines = [json.dumps({"step": n, "compute_seconds": 0.1, "workers": 2, "tokens": 64 * n}) for n in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    rows = json.loads(ask("--run", str(tmp_path), *LINE, "--layers", "4", "--tokens", "64000", "--json"))
    assert rows[0]["seconds"] == pytest.approx(1000 * 0.1 / rows[0]["utilization"])


MODEL = "[model]\nlayers = 24\nwidth = 16\nheads = 1\nhidden = 16\ncontext = 16\n"


def trained(command, folder):
    """The config of a run that a command of the planner's starts, kept to one step."""
    words = shlex.split(command)
    assert words[0] == "thinwire"
    few = ["--steps", "1", "--set", "train.eval_batches=1", "--set", "train.batch=1", "--set", "logging.report=false"]
    run(*words[1:], *few, "--out", str(folder), program=("-m", "thinwire"))
    return (folder / "config.toml").read_text()


def test_the_command_trains_the_planned_model(tmp_path, ask):
    (tmp_path / "my model.toml").write_text(MODEL)
    model = ["--params", "350M", "--layers", "24", "--step-time", ".5s", "--workers", "2"]
    command = ask(*model, "--bandwidth", "10Gbit").splitlines()[-1].strip()
    assert command.startswith("thinwire train CONFIG.toml --method streaming_diloco")
    config = trained(command.replace("CONFIG.toml", shlex.quote(str(tmp_path / "my model.toml"))), tmp_path / "run")
    assert "fragments = 8" in config and "layers = 24" in config


def test_the_commands_of_a_run_name_its_model_and_the_planned_methods(tmp_path, ask):
    """Not what the run's own method left in the config: a codec and a momentum that were chosen for it."""
    folder = tmp_path / "a run"
    folder.mkdir()
    method = '[method]\nname = "diloco"\nevery = 4\ncodec = "Int8()"\nouter_momentum = 0.5\n'
    (folder / "config.toml").write_text(f"parameters = 1_000_000\nworkers = 2\n{method}{MODEL}")
    (folder / "metrics.jsonl").write_text('{"step": 1, "compute_seconds": 0.1}\n')
    rows = {row["method"]: row for row in json.loads(ask("--run", str(folder), *LINE, "--json"))}
    for setting in settings(layers=24):
        command = rows[setting["name"]]["command"]
        assert command.startswith(f"thinwire train '{folder}/config.toml' --method {setting['name']} ")
        printed = CliRunner().invoke(app, [*shlex.split(command)[1:], "--print-config"]).output
        (tmp_path / "printed.toml").write_text(printed)
        config = load(tmp_path / "printed.toml")
        assert resolved_method(config.method) == resolved_method(setting) and config.model.layers == 24


@pytest.mark.parametrize(
    ("told", "same"),
    [
        (["--params", "1e6"], True),
        (["--step-time", "2s"], True),
        (["--params", "7e9"], False),
        (["--layers", "8"], False),
    ],
)
def test_another_model_than_the_runs_is_not_in_its_config(tmp_path, ask, told, same):
    (tmp_path / "config.toml").write_text("parameters = 1_000_000\nworkers = 2\n[model]\nlayers = 4\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "compute_seconds": 0.1}\n')
    command = json.loads(ask("--run", str(tmp_path), *LINE, "--json", *told))[0]["command"]
    assert (f"{tmp_path}/config.toml" in command) == same
    assert command.startswith("thinwire train CONFIG.toml ") != same


def test_the_order_of_the_lines_is_no_matter(ask):
    order = ["1Gbit", "100Mbit/1Gbit", "1Gbit/100Mbit", "10Mbit"]
    there, back = (
        ask(*ASK, "--bandwidth", ",".join(lines), "--mtbf", "30min", "--json") for lines in (order, order[::-1])
    )
    assert json.loads(there) == json.loads(back)


@pytest.mark.parametrize(
    "arguments",
    [
        [*ASK, "--bandwidth", "-5Mbit"],
        [*ASK, "--bandwidth", "5 furlongs"],
        [*ASK, *LINE, "--workers", "0"],
        [*ASK, *LINE, "--workers", "1000000000000"],
        [*ASK, *LINE, "--layers", "100000"],
        [*ASK, *LINE, "--params", "1e30"],
        [*ASK, *LINE, "--layers", "0"],
        [*ASK, *LINE, "--step-time", "0s"],
        [*ASK, *LINE, "--step-time", "1s,2s"],
        [*ASK, *LINE, "--params", "5"],
        [*ASK, *LINE, "--slow-workers", "9"],
        [*ASK, *LINE, "--slow-workers", "5%x0"],
        [*ASK, *LINE, "--slow-workers", "5%x"],
        ["--paper-tables", *LINE],
        ["--paper-tables", "--json", "--plot", "curve.html"],
        [*ASK, *LINE, "--mtbf", "0s"],
        [*ASK, *LINE, "--plot", "curve.jpeg"],
        [*ASK, *LINE, "--plot", "/nonexistent/curve.html"],
        [*ASK, *LINE, "--gpu-memory", "lots"],
        [*ASK, *LINE, "--probe"],
        ["--bandwidth", "1Gbit"],
        ["--run", "/nonexistent", *LINE],
        ["--no-such-option"],
    ],
    ids=" ".join,
)
def test_nonsense_is_refused_in_one_line(arguments, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("thinwire plan: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--paper-tables", "--latency", "20ms"], "--latency goes without --paper-tables"),
        ([*ASK, "--probe"], "--latency goes with --bandwidth: --probe measures the latency as well"),
    ],
    ids=["paper tables", "probe"],
)
def test_options_that_would_have_no_effect_are_refused(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_more_slow_workers_than_workers_are_counted_in_the_refusal(capsys):
    assert main([*ASK, *LINE, "--workers", "2", "--slow-workers", "3"]) == 2
    assert "--slow-workers 3: there are only 2 workers" in capsys.readouterr().err


def test_a_refusal_seen_from_outside():
    done = run(*ASK, "--bandwidth", "0Mbit", check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_probe_measures_between_the_processes_of_a_torchrun():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "thinwire.plan", "--probe"]
    model = ["--params", "1e6", "--layers", "2", "--batch-tokens", "256", "--json"]
    rows = json.loads(run(*model, program=command).stdout)
    assert all(0 < row["utilization"] <= 1 for row in rows)
