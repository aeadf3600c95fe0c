"""Ports and interfaces of this machine: which interface leads to the master, and which port nobody has.

``group`` asks for the interface before gloo starts, which otherwise guesses by hostname and is wrong on many machines;
``launch`` asks for a free port where a node trains alone and needs to agree with nobody.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915


def route_interface(host: str) -> str | None:
    """Name of the interface whose address this machine would use towards ``host``; None where it cannot be told."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a datagram socket sends nothing here, it only asks the routing table
            local = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
    for _, name in socket.if_nameindex():
        if local in _addresses(name):
            return name
    return "lo" if local.is_loopback else None


def free_port() -> int:
    """A TCP port free on loopback at this moment, for a node that trains alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _addresses(interface: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
            found.add(ipaddress.IPv4Address(answer[20:24]))
        except OSError:
            pass  # an interface without an IPv4 address
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return found
    for fields in (line.split() for line in lines):
        if len(fields) == 6 and fields[5] == interface:
            found.add(ipaddress.IPv6Address(int(fields[0], 16)))
    return found
