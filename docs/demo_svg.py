"""Draws docs/demo.svg from a finished demo run:  gradsight demo --run_dir RUN_DIR && python docs/demo_svg.py RUN_DIR"""

import io
import re
import sys
from pathlib import Path

import numpy as np
from gradsight.cli.outline import outline
from gradsight.record.reader import open_run
from rich.console import Console
from rich.text import Text

from gradsight.show.markdown import summarize
from gradsight.train.demonstration import Demonstration
from gradsight.train.sample_texts import SampleTexts
from gradsight.train.samples import Order, open_samples


def main(run_dir: Path) -> None:
    run, planned = open_run(run_dir), Demonstration()
    order = Order(np.ones(len(open_samples(run.config["settings"]))), seed=0)
    poisoned = order.take(planned.poisoned_step * planned.batch_size, planned.batch_size)[
        planned.poisoned_row
    ]
    _, lines = outline(run, summarize(run), SampleTexts(run_dir), planned, poisoned, colour=True)
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(["$ gradsight demo", "", *lines])), soft_wrap=True)
    drawn = console.export_svg(title="gradsight demo", unique_id="demo")
    drawn = re.sub(
        r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL
    )  # fonts from elsewhere: a picture needs no network
    (Path(__file__).parent / "demo.svg").write_text(
        re.sub(r"<!--.*?-->\s*", "", drawn), encoding="utf-8"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
