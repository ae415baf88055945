"""One training step without and with gradient checkpointing: both peaks, and the same gradients.

python3 verify_gradient_checkpointing.py [the options of `gradsight memory verify`]
"""

import sys

from gradsight.cli import main

if __name__ == "__main__":
    sys.exit(main(["memory", "verify", *sys.argv[1:]]))
