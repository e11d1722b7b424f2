"""Folders in which the kernel shows a machine's CPUs, their caches and sockets, and its memory nodes: emulated ones."""

from __future__ import annotations

from pathlib import Path


def machine(root: Path, caches: list[int], sockets: list[int]) -> Path:
    """The kernel's folder of CPUs: of each the number of its third-level cache (-1: none) and of its socket."""
    for cpu, (cache, socket) in enumerate(zip(caches, sockets, strict=True)):
        at = root / f"cpu{cpu}"
        for index, (level, shared) in enumerate((("1", str(cpu)), ("1", str(cpu)), ("2", str(cpu)), ("3", ""))):
            if level == "3":
                if cache < 0:
                    continue
                shared = ",".join(str(other) for other, of in enumerate(caches) if of == cache)
            folder = at / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
        (at / "topology").mkdir(parents=True)
        (at / "topology" / "physical_package_id").write_text(f"{socket}\n")
    return root


def memory_nodes(root: Path, lists: dict[int, str]) -> Path:
    """The kernel's folder of memory nodes: by the number of each the list of its CPUs, as in "0-3,8"."""
    for number, cpus in lists.items():
        folder = root / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    (root / "online").write_text("0\n")
    return root
