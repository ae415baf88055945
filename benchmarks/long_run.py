"""Writes a run of any size for measurements of what reads it: drifting norms, spikes, a NaN."""

import sys
import time
from pathlib import Path

import numpy as np

from gradsight.store import tail_format as frames
from gradsight.store.run_files import write_config
from gradsight.store.store import Store, open_store
from gradsight.values.findings import Finding
from gradsight.values.steps import Step

PARTS = ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias")
PARTS += ("ln_1.weight", "ln_1.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight")
PARTS += ("mlp.c_proj.bias", "ln_2.weight", "ln_2.bias")
SPIKE = 0.71
"""Where in the run the spike lies."""


def names_of(parameters: int) -> list[str]:
    """So many parameters of a GPT-2."""
    blocks = -(-parameters // len(PARTS))
    every = [f"transformer.h.{block}.{part}" for block in range(blocks) for part in PARTS]
    return every[:parameters]


def norms_of(parameters: int, steps: int, first: int = 0) -> np.ndarray:
    """Norms by step and parameter: a level each, slow drift, noise."""
    random = np.random.default_rng(first)
    level = np.random.default_rng(0).normal(-4, 2, parameters)
    drift = np.sin(np.arange(first, first + steps) / 5000)[:, None]
    return np.exp2(level + drift + 0.35 * random.standard_normal((steps, parameters)))


def write_run(folder: Path, parameters: int, steps: int) -> None:
    """The whole run, closed."""
    names = names_of(parameters)
    settings = {
        "parameters": [{"name": name, "shape": [8, 8], "dtype": "float32"} for name in names]
    }
    store = open_store(folder)
    write_config(folder, settings)
    add_steps(store, names, steps)
    spike = int(steps * SPIKE)
    store.add_finding(
        Finding("GS201", "gradient spike", "warning", (names[3],), spike, "40 times", "", "", "")
    )
    store.close()


def add_steps(store: Store, names: list[str], steps: int, first: int = 0) -> None:
    """More steps of a run that is open."""
    began = time.time()
    spike = int(steps * SPIKE)
    for start in range(first, first + steps, 1000):
        count = min(1000, first + steps - start)
        norms = norms_of(len(names), count, start)
        if start <= spike < start + count:
            norms[spike - start] *= 40
        for offset, row in enumerate(norms):
            number = start + offset
            step = Step(
                number, began + number, loss=3 + row[0], lr=1e-3, total_norm=np.sqrt(row @ row)
            )
            zeros = np.zeros(len(names))
            columns = {"l2": row, "max_abs": row / 2, "nan": zeros, "inf": zeros}
            store.add_step(step, names, frames.pack_statistics(None, columns))


if __name__ == "__main__":
    where, parameters, steps = sys.argv[1:]
    write_run(Path(where), int(parameters), int(steps))
