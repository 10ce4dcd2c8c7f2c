"""Elastic training on torchft: workers come and go."""

from importlib.util import find_spec

if find_spec("torchft") is None:
    raise ModuleNotFoundError("torchft is not installed: pip install 'thinwire[elastic]'", name="torchft")

from .transport import Elastic  # noqa: E402

__all__ = ["Elastic"]
