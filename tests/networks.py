"""Whether this machine lets tests make networks."""

from __future__ import annotations

from virtual.virtual_nodes import Cluster, network


def networks_can_be_made() -> bool:
    try:
        with network(Cluster(1, 1, 10**7)):
            return True
    except OSError:
        return False
