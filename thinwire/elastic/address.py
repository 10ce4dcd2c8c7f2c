"""HOST:PORT as text, and which addresses stay on this machine."""

from __future__ import annotations

import ipaddress
import socket

from thinwire.site import likely_address


def split(text: str) -> tuple[str, int]:
    """
    >>> split("10.0.0.1:29510"), split("[::1]:80")
    (('10.0.0.1', 29510), ('::1', 80))
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r}: write HOST:PORT, for example 10.0.0.1:29510")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """
    >>> join("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> list[str]:
    """The IP addresses of a host; an unknown name raises `socket.gaierror`."""
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))


def is_loopback(host: str) -> bool:
    """Whether every address of the host stays on this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("10.0.0.1")
    (True, True, False, False)
    """
    return all(_ip(address).is_loopback for address in resolve(host))


def is_wildcard(host: str) -> bool:
    """Whether it means every interface: fit to bind to, useless to tell others.

    >>> is_wildcard("0.0.0.0"), is_wildcard("::"), is_wildcard("10.0.0.1")
    (True, True, False)
    """
    return all(_ip(address).is_unspecified for address in resolve(host))


def advertised(host: str) -> str:
    """The address by which others reach what is bound to `host`: of a wildcard, that of the default route."""
    return likely_address() if is_wildcard(host) else host


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])  # without the zone of fe80::1%eth0
