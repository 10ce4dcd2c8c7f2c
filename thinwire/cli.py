"""The command line: `thinwire train`, `compare`, `check`, `coordinator`, `report` and `plan`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ImportError:  # the console script comes with the bare library too
    sys.exit("thinwire: the command line needs more packages: pip install 'thinwire[train]'")


EXTRA = (
    "matplotlib",
    "numpy",
    "plotly",
    "rich",
    "safetensors",
    "sklearn",
    "tensorboard",
    "tokenizers",
    "tomli",
)  # of thinwire[train]

# typer brings a click of its own in some versions: take the class of its complaints from one of them
COMPLAINT: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


class WithPlan(typer.core.TyperGroup):
    """`plan` brings its own imports: they are made when it is called for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "plan"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "plan" and cmd_name not in self.commands:
            from thinwire.plan.command import plan

            alone = typer.Typer(add_completion=False)
            alone.command("plan")(plan)
            self.commands["plan"] = typer.main.get_command(alone)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=WithPlan,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train one model over slow links.",
)

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a config key, for example optimizer.lr=1e-3."),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Run folder; default: the next free one under runs/.")
]
Conf = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.toml", help="A config file; default: a small GPT on Python's own source text."),
]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps of each worker.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Workers in all.")]


@app.command()
def train(
    config: Conf = None,
    method: Annotated[str | None, typer.Option("--method", metavar="NAME", help="desloc, diloco, ddp, ...")] = None,
    workers: Workers = None,
    steps: Steps = None,
    out: Out = None,
    sets: Sets = None,
    locals_: Annotated[
        list[str] | None,
        typer.Option("--local", metavar="KEY=VALUE", help="Set a key for this machine only: train.batch=4."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with the run in this folder.")
    ] = None,
    stop_at: Annotated[
        int | None, typer.Option("--stop-at", min=1, metavar="N", help="Save and stop after step N.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, metavar="N", help="Start N real processes on this machine.")
    ] = None,
    connect: Annotated[
        str | None, typer.Option("--connect", metavar="HOST:PORT", help="Join other machines; worker 0 listens there.")
    ] = None,
    worker: Annotated[
        int | None, typer.Option("--worker", min=0, metavar="I", help="With --connect: this machine's number, from 0.")
    ] = None,
    join: Annotated[
        str | None, typer.Option("--join", metavar="HOST:PORT", help="Join the fleet of `thinwire coordinator` there.")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", metavar="FILE", help="With --join: the coordinator's secret.")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", metavar="IP", help="With --join: this machine's, if not the one found.")
    ] = None,
    min_workers: Annotated[
        int | None, typer.Option("--min-workers", min=1, metavar="N", help="With --join: wait while there are fewer.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the config, each key with a comment, and exit.")
    ] = False,
) -> None:
    """Train a model. With no arguments: a small GPT, 4 workers in one process, DES-LOC, about two minutes."""
    from thinwire.train.command import Join, TrainRequest
    from thinwire.train.command import train as start

    if join is None and (secret_file or address or min_workers):
        raise typer.BadParameter("--secret-file, --address and --min-workers go with --join HOST:PORT")
    flags = {"method.name": method, "workers": workers, "steps": steps}
    start(
        TrainRequest(
            config=config,
            flags={key: value for key, value in flags.items() if value is not None},
            sets=sets or [],
            locals=locals_ or [],
            out=out,
            resume=resume,
            stop_at=stop_at,
            processes=processes,
            connect=connect,
            worker=worker,
            join=Join(join, secret_file, address, min_workers or 1) if join else None,
            print_config=print_config,
        )
    )


@app.command()
def compare(
    methods: Annotated[str, typer.Option("--methods", metavar="A,B,...", help="Methods to compare, by name.")] = (
        "ddp,local_adam,desloc,diloco,eager_diloco,decoupled_momentum"
    ),
    config: Conf = None,
    workers: Workers = None,
    steps: Steps = None,
    out: Out = None,
    sets: Sets = None,
) -> None:
    """Train the same model on the same tokens with each method, and put them side by side."""
    from thinwire.train.command import compare as start

    flags = {"workers": workers, "steps": steps}
    start(methods, config, {key: value for key, value in flags.items() if value is not None}, sets or [], out)


@app.command()
def check(
    address: Annotated[str | None, typer.Argument(metavar="HOST:PORT", help="Where the other side listens.")] = None,
    listen: Annotated[
        int | None, typer.Option("--listen", min=1, max=65535, metavar="PORT", help="Be the other side.")
    ] = None,
) -> None:
    """Test the line between two machines: each direction, latency, Mbit/s, versions."""
    from thinwire.train.check import check as start

    start(address, listen)


@app.command()
def coordinator(
    bind: Annotated[
        str, typer.Option("--bind", metavar="ADDRESS", help="Where to listen; beyond loopback a secret is needed.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=1, max=65534, metavar="P", help="The lighthouse's; the page is at P + 1.")
    ] = 29510,
    min_workers: Annotated[int, typer.Option("--min-workers", min=1, help="With fewer, training waits.")] = 1,
    round_deadline: Annotated[
        str | None,
        typer.Option("--round-deadline", metavar="TIME", help="A round takes those that arrive in time: 30s, 2min."),
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", metavar="FILE", help="The shared secret; made if it is not there.")
    ] = None,
) -> None:
    """Bring workers together that come and go, and show who is live, who takes part and what was committed."""
    os.environ.setdefault("RUST_LOG", "warn")  # read when torchft is imported; it tells every round otherwise
    from thinwire.elastic.command import coordinator as start

    start(bind, port, min_workers, round_deadline, secret_file)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run or of a comparison.")],
) -> None:
    """Write report.html for a run or a comparison."""
    from thinwire.train.command import report as start

    start(folder)


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit status 2, a file that cannot be used 1."""
    from thinwire.train.errors import UserError, file_line

    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        status = typer.main.get_command(app)(standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except COMPLAINT as error:
        sys.exit(_complain(error.format_message(), 2))
    except UserError as error:
        sys.exit(_complain(str(error), 2))
    except OSError as error:
        sys.exit(_complain(file_line(error), 1))
    except ModuleNotFoundError as error:
        if error.name in EXTRA:
            sys.exit(_complain(f"{error.name} is not installed: pip install 'thinwire[train]'", 1))
        if error.name == "torchft":
            sys.exit(_complain(str(error), 1))
        raise
    sys.exit(status if isinstance(status, int) else 0)


def _complain(line: str, status: int) -> int:
    print(f"thinwire: {' '.join(line.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
