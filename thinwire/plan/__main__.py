"""`python -m thinwire.plan`: the same as `thinwire plan`."""

from __future__ import annotations

import sys

import typer

from thinwire.plan.command import plan


def main(arguments: list[str] | None = None) -> int:
    app = typer.Typer(add_completion=False)
    app.command()(plan)
    try:
        return int(app(arguments, standalone_mode=False) or 0)
    except Exception as error:
        # An unknown option, say: one line, as for every other mistake. Some releases of typer bring a click of their
        # own, so its exceptions are known by what they can do.
        if not hasattr(error, "format_message"):
            raise
        print(f"thinwire plan: {error.format_message()}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
