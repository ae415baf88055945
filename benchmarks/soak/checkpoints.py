"""Flipped bytes, cuts and insertions in the trainer's checkpoints: every one is noticed.

    python benchmarks/soak/checkpoints.py --tries 300

A damaged copy must be refused by name, or be read as what was written: JSON has more than one way
to write the same.
"""

import argparse
import random
import tempfile
from pathlib import Path

from forks import ended, import_everything, start, tell
from kills import train_command

from gradsight.errors import RunError
from gradsight.train.checkpoint import newest, read_facts

FILES = ("tensors.safetensors", "checkpoint.json")


def spoil(data: bytes, chance: random.Random) -> bytes:
    """70% one to eight bytes changed, 20% cut, 10% inserted or zeroed."""
    spoilt = bytearray(data)
    kind = chance.random()
    place = chance.randrange(len(spoilt))
    if kind < 0.7:
        for _ in range(chance.randint(1, 8)):
            spoilt[chance.randrange(len(spoilt))] ^= chance.randint(1, 255)
    elif kind < 0.9:
        del spoilt[place:]
    elif kind < 0.95:
        spoilt[place:place] = chance.randbytes(chance.randint(1, 64))
    else:
        spoilt[place : place + 64] = bytes(len(spoilt[place : place + 64]))
    return bytes(spoilt)


def main(tries: int) -> None:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "text.txt").write_text("".join(f"{n} crows and herons\n" for n in range(400)))
        said = place / "said"
        code = ended(start(train_command(place, place / "Results", "--experiment=a"), said))
        assert code == 0, said.read_text()
        run_dir = place / "Results" / "a"
        checkpoint = newest(run_dir)
        assert checkpoint is not None
        intact = read_facts(run_dir, checkpoint.name)
        for name in FILES:
            file = checkpoint / name
            before = file.read_bytes()
            failures = 0
            for _ in range(tries):
                file.write_bytes(spoil(before, chance))
                failures += not noticed(run_dir, checkpoint.name, intact, file, before)
            file.write_bytes(before)
            tell(f"damage in {name} is noticed", tries, failures)


def noticed(run_dir: Path, name: str, intact: object, file: Path, before: bytes) -> bool:
    try:
        facts = read_facts(run_dir, name)
    except RunError as error:
        return name in str(error) and "damaged" in str(error)
    return facts == intact and (file.suffix == ".json" or file.read_bytes() == before)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=300)
    options = parser.parse_args()
    import_everything()
    main(options.tries)
