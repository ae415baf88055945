"""Draws docs/demo.svg from a finished demo run.

gradsight demo --run_dir RUN_DIR && python docs/demo_svg.py RUN_DIR
"""

import io
import re
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from gradsight.cli.demo_summary import demo_summary
from gradsight.show.summary import summarize
from gradsight.store.reader import open_run
from gradsight.train.demonstration import Demonstration
from gradsight.train.sample_texts import SampleTexts
from gradsight.train.samples import Order, open_samples


def main(run_dir: Path) -> None:
    """Print the summary of the run again, into a picture."""
    run = open_run(run_dir)
    planned = Demonstration()
    order = Order(np.ones(len(open_samples(run.config["settings"]))), seed=0)
    poisoned = planned.poisoned_sample(order)
    texts = SampleTexts(run_dir)
    _, lines = demo_summary(run.path, summarize(run), texts, planned, poisoned, colour=True)
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(["$ gradsight demo", "", *lines])), soft_wrap=True)
    drawn = console.export_svg(title="gradsight demo", unique_id="demo")
    # Without fonts from elsewhere: a picture needs no network.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<!--.*?-->\s*", "", drawn)
    (Path(__file__).parent / "demo.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
