"""What a look at the gradients costs the host: see look_costs.py, which this runs.

python benchmarks/statistics.py [--turns 60]
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    from look_costs import main

    main()
else:
    # Beside other benchmarks this file stands in the way of Python's own module: hand that on.
    path = Path(sysconfig.get_path("stdlib")) / "statistics.py"
    spec = importlib.util.spec_from_file_location("statistics", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["statistics"] = module
    spec.loader.exec_module(module)
