"""The emulated links: when packets arrive, by a clock of the test's; what they are on the wire; and one real link."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.link import check
from bench.link.links import LINKS, Link
from bench.link.shaping import Direction, Network

SLOW = Link("slow", "80 kbit/s, 400 ms", 80_000, 0.4)  # 10,000 bytes a second, 0.1 s from end to end of a rank's link


def network(link: Link = SLOW, ranks: int = 3, chance: Callable[[], float] = lambda: 0.5) -> Network:
    return Network(link, ranks, chance)


def arrivals(net: Network, until: float = 1e9) -> list[tuple[float, int, bytes]]:
    """When each packet arrives, at whom, by a clock that steps from one to the next."""
    seen = []
    while net.next is not None and net.next <= until:
        now = net.next
        seen += [(round(now, 9), target, packet) for target, packet in net.arrived(now)]
    return seen


def test_a_packet_takes_its_bytes_at_the_rate_and_the_delay() -> None:
    one = Direction(80_000, 0.1, 10_000)
    assert one.arrival(5.0, 1000) == pytest.approx(5.0 + 0.1 + 0.1)


def test_packets_pass_one_after_the_other() -> None:
    one = Direction(80_000, 0.1, 10_000)
    assert [one.arrival(0.0, 1000) for _ in range(3)] == pytest.approx([0.2, 0.3, 0.4])
    assert one.arrival(10.0, 1000) == pytest.approx(10.2)  # it has been free for long: no credit for that


def test_what_does_not_fit_into_the_queue_is_dropped() -> None:
    one = Direction(80_000, 0.1, 2000)
    times = [one.arrival(0.0, 1000) for _ in range(5)]
    assert times[:3] == pytest.approx([0.2, 0.3, 0.4])  # one passes, two wait
    assert times[3:] == [None, None]
    assert one.arrival(0.15, 1000) == pytest.approx(0.5)  # there is room again


def test_a_way_leads_through_two_links_and_a_round_trip_takes_the_promised_time() -> None:
    net = network()
    net.send(0.0, 0, 1, 0, b"there")
    assert arrivals(net) == [(0.2, 1, b"there")]
    net.send(0.2, 1, 0, 0, b"back")
    assert arrivals(net) == [(0.4, 0, b"back")]


def test_the_rate_from_one_rank_to_another_is_that_of_one_link() -> None:
    net = network()
    for _ in range(5):
        net.send(0.0, 0, 1, 1000, b"")
    times = [at for at, _, _ in arrivals(net)]
    assert times == pytest.approx([0.4 + 0.1 * place for place in range(5)])


def test_two_senders_share_the_receivers_link_and_have_links_of_their_own() -> None:
    net = network()
    for _ in range(2):
        net.send(0.0, 0, 2, 1000, b"a")
        net.send(0.0, 1, 2, 1000, b"b")
    net.send(0.0, 2, 0, 1000, b"c")  # the other direction is apart
    seen = arrivals(net)
    assert [at for at, target, _ in seen if target == 2] == pytest.approx([0.4, 0.5, 0.6, 0.7])
    assert sorted(packet for _, target, packet in seen if target == 2) == [b"a", b"a", b"b", b"b"]
    assert [at for at, target, _ in seen if target == 0] == pytest.approx([0.4])


def test_losses_are_counted_apart_from_what_a_full_queue_drops() -> None:
    chances = iter([0.5, 0.0009, 0.5, 0.001])
    net = network(Link("lossy", "", 80_000, 0.4, 0.001), chance=lambda: next(chances))
    for number in range(4):
        net.send(0.0, 0, 1, 10, bytes([number]))
    assert [packet[0] for _, _, packet in arrivals(net)] == [0, 2, 3]
    assert (net.lost, net.dropped) == (1, 0)
    full = network(Link("full", "", 80_000, 0.0))
    for _ in range(1000):
        full.send(0.0, 0, 1, 1000, b"")
    passed = len(arrivals(full))
    assert full.lost == 0
    assert (passed, full.dropped) == (263, 737)  # one passes, and 2**18 bytes wait


def checked(link: Link, **measured: float) -> check.Checked:
    usual = {"bits_per_s": 0.96 * link.bits_per_s, "round_trip_s": 1.01 * link.round_trip, "loss": link.loss}
    return check.Checked(link, **{**usual, **measured}, datagrams=20_000)


def test_a_link_is_refused_for_its_rate_its_delay_or_its_loss() -> None:
    link, lossy = LINKS["20mbit"], LINKS["20mbit-loss"]
    assert checked(link).holds
    assert checked(lossy).holds
    assert not checked(link, bits_per_s=0.8 * link.bits_per_s).holds
    assert not checked(link, bits_per_s=1.1 * link.bits_per_s).holds
    assert not checked(link, round_trip_s=0.070).holds
    assert not checked(link, round_trip_s=0.120).holds
    assert not checked(link, loss=0.01).holds
    assert not checked(lossy, loss=0.0).holds
    assert checked(lossy, bits_per_s=5e6).holds  # TCP does not fill a link that loses packets


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists(),
    reason="needs root, the program ip and TUN devices",
)
def test_a_real_link_holds_its_rate_and_its_delay_and_leaves_nothing() -> None:
    measured = check.check(LINKS["20mbit"], seconds=1.5, datagrams=200)
    promised = measured.link
    # not `holds`, which a busy machine may miss: what arrives while the receiver waits for a core is counted late
    assert 0 < measured.bits_per_s <= 1.5 * promised.bits_per_s
    assert measured.round_trip_s >= 0.98 * promised.round_trip
    left = [*Path("/run/netns").iterdir(), *Path("/sys/class/net").iterdir()]
    assert not [path for path in left if path.name.startswith((f"rolecall-link-{os.getpid()}-", f"rl{os.getpid()}"))]
