"""The coordinator's page (being written)."""

HTML = b"<!doctype html><title>thinwire</title>"
HEADERS: dict[str, str] = {}
