"""Elastic training on torchft: workers come and go."""

import logging
import os
from importlib.util import find_spec

if find_spec("torchft") is None:
    raise ModuleNotFoundError("torchft is not installed: pip install 'thinwire[elastic]'", name="torchft")

os.environ.setdefault("RUST_LOG", "error")  # torchft tells of every quorum and vote; read when it is loaded
logging.getLogger("torchft.manager").setLevel(logging.CRITICAL)  # what goes wrong there becomes an event of the fleet

from .transport import Elastic, RunFinished  # noqa: E402

__all__ = ["Elastic", "RunFinished"]
