"""Counts the threads of gloo in this process, by the names that torch gives them."""

from pathlib import Path


def gloo_threads() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue  # it has ended since
    return names.count("pt_gloo_runloop")
