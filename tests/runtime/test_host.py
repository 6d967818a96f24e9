"""The processors and the memory that a process may use."""

import os

from gspmd_lm.runtime import host


def test_what_a_container_keeps_of_files_is_free(tmp_path, monkeypatch):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1000 kB\nSwapFree: 0 kB\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    monkeypatch.setattr(host, "Path", lambda path: tmp_path / path[1:])
    assert host.free_bytes() == 1000 * 1024
    (group / "memory.max").write_text("800000\n")
    (group / "memory.current").write_text("790000\n")
    (group / "memory.stat").write_text("anon 90000\ninactive_file 600000\nactive_file 100000\n")
    assert host.free_bytes() == 610_000
    (group / "memory.max").write_text("max\n")
    assert host.free_bytes() == 1000 * 1024


def test_a_system_that_says_less_than_linux(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(host, "Path", lambda path: tmp_path / path[1:])  # as if there were no /proc
    assert host.count_cpus() == 3 and host.free_bytes() is None
