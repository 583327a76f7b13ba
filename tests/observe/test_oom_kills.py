"""The kernel's counter of processes killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

from rolecall.observe.cgroup import Cgroup, OomKills


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def before(own: int | None) -> OomKills:
    return OomKills(own, None)


def test_the_counter_of_ones_own_cgroup(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    assert Cgroup(tmp_path, membership).oom_kills().group is None
    write(membership, "0::/pods/rank\n")
    write(tmp_path / "memory.events", "low 0\noom 9\noom_kill 9\n")
    assert Cgroup(tmp_path, membership).oom_kills().group == 9  # a container sees its own at the root
    write(tmp_path / "pods/rank/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 1\n")
    assert Cgroup(tmp_path, membership).oom_kills().group == 2
    write(membership, "5:memory:/docker/abc\n0::/\n")
    (tmp_path / "memory.events").unlink()
    write(tmp_path / "memory/docker/abc/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert Cgroup(tmp_path, membership).oom_kills().group == 4
    write(tmp_path / "memory/docker/abc/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n")  # an old kernel
    assert Cgroup(tmp_path, membership).oom_kills().group is None


def test_that_memory_ran_out_is_said_with_its_limit_and_peak(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    write(membership, "0::/pods/rank\n")
    write(tmp_path / "pods/rank/memory.events", "oom_kill 2\n")
    assert Cgroup(tmp_path, membership).ran_out(before(2)) == ""
    assert Cgroup(tmp_path, membership).ran_out(before(None)).endswith("?")
    assert Cgroup(tmp_path, membership).ran_out(before(1)) == "out of memory"
    write(tmp_path / "pods/rank/memory.max", "max\n")
    write(tmp_path / "pods/rank/memory.peak", f"{259 * 2**20}\n")
    assert Cgroup(tmp_path, membership).ran_out(before(1)) == "out of memory (peak 259 MiB)"
    write(tmp_path / "pods/rank/memory.max", f"{260 * 2**20}\n")
    assert Cgroup(tmp_path, membership).ran_out(before(1)) == "out of memory (limit 260 MiB, peak 259 MiB)"
    write(membership, "5:memory:/docker/abc\n0::/\n")
    write(tmp_path / "memory/docker/abc/memory.oom_control", "oom_kill 4\n")
    write(tmp_path / "memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "memory/docker/abc/memory.max_usage_in_bytes", f"{5 * 2**20}\n")
    assert Cgroup(tmp_path, membership).ran_out(before(3)) == "out of memory (peak 5 MiB)"


def test_a_count_that_has_not_moved_shows_that_memory_did_not_run_out(tmp_path: Path) -> None:
    membership, vmstat = tmp_path / "cgroup", tmp_path / "vmstat"
    cgroup = Cgroup(tmp_path, membership, vmstat)
    assert cgroup.ran_out(cgroup.oom_kills()) == "out of memory?"
    write(vmstat, "nr_free_pages 7\noom_kill 3\n")
    assert cgroup.oom_kills() == (None, 3)
    assert cgroup.ran_out(OomKills(None, 3)) == ""
    assert cgroup.ran_out(OomKills(None, 2)) == "out of memory?"  # of another container, perhaps
    write(membership, "0::/pods/rank\n")
    write(tmp_path / "pods/rank/memory.events", "oom_kill 2\n")
    assert cgroup.ran_out(OomKills(2, 2)) == ""
    assert cgroup.ran_out(OomKills(1, 2)) == "out of memory"
