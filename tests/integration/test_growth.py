"""What `make bench-ps` measures growth with: a real server, and processes that pose as trainers."""

from __future__ import annotations

from bench import growth_ps


def test_posed_trainers_push_to_a_real_server() -> None:
    points = growth_ps.measure("sync", 1, trainers=(1,), seconds=0.2)
    assert [(point.servers, point.trainers) for point in points] == [(1, 1)]
    assert points[0].pushes_per_s > 0
    assert points[0].servers_cpu_s > 0
    assert points[0].trainers_cpu_s > 0
