"""`python -m thinwire.plan`: the same as `thinwire plan`."""

from __future__ import annotations

import sys

import click
import typer

from thinwire.plan.command import plan


def main() -> int:
    app = typer.Typer(add_completion=False)
    app.command()(plan)
    try:
        return int(app(standalone_mode=False) or 0)
    except click.ClickException as error:  # an unknown option, say: one line, as for every other mistake
        print(f"thinwire plan: {error.format_message()}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
