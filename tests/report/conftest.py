"""The command line's fixtures, as the trainer's tests have them."""

from tests.train.conftest import start, thinwire

__all__ = ["start", "thinwire"]
