"""The settings of the tests' container engine."""

from __future__ import annotations

import pytest

from tests.docs.container_engine import Unavailable, free_subnet

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
DEFAULT = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"


def route(destination: str, mask: str) -> str:
    return f"cni-podman0\t{destination}\t00000000\t0001\t0\t0\t0\t{mask}\t0\t0\t0\n"


def test_containers_get_a_subnet_without_a_route() -> None:
    assert free_subnet(HEAD + DEFAULT) == "10.88.0.0/16"
    assert free_subnet(HEAD + DEFAULT + route("0000580A", "0000FFFF")) == "10.87.0.0/16"  # 10.88.0.0/16
    both = route("0000580A", "0000FFFF") + route("0001570A", "00FFFFFF")  # and 10.87.1.0/24
    assert free_subnet(HEAD + DEFAULT + both) == "10.86.0.0/16"


def test_a_machine_without_a_free_subnet_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="every subnet"):
        free_subnet(HEAD + route("0000000A", "000000FF"))
