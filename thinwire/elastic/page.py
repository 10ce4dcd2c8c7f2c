"""The coordinator's page: one file without outside parts, which asks for `/status` every second.

Its headers let it run its own script and style and nothing else, so a worker's name can never become code.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

HTML = (Path(__file__).parent / "page.html").read_bytes()


def _allowed(tag: bytes) -> str:
    """The hash by which a browser knows this page's own script or style."""
    (text,) = re.findall(b"<" + tag + b">(.*?)</" + tag + b">", HTML, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


HEADERS = {
    "Content_Security_Policy": "; ".join(
        (
            "default-src 'none'",
            f"script-src {_allowed(b'script')}",
            f"style-src {_allowed(b'style')}",
            "connect-src 'self'",
            "img-src data:",
            "frame-ancestors 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    ),
    "Referrer_Policy": "no-referrer",
}
