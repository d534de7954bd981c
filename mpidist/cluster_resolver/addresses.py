"""How the address of a task is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["PORT_BASE", "number_ports", "with_rpc_layer"]

PORT_BASE = 8888


def number_ports(hosts: Sequence[str], port_base: int = PORT_BASE) -> list[str]:
    """Give each task an address of its own: the k-th task on a host gets port `port_base + k`.

    Args:
        hosts: Host of each task, in the order of tasks.
        port_base: Port of the first task on each host.
    """
    seen: Counter[str] = Counter()
    addresses = []
    for host in hosts:
        addresses.append(f"{host}:{port_base + seen[host]}")
        seen[host] += 1
    return addresses


def with_rpc_layer(address: str, rpc_layer: str | None) -> str:
    """Put the rpc layer before an address: `grpc://n1:8888`. No address or no layer: unchanged."""
    return f"{rpc_layer}://{address}" if address and rpc_layer else address
