"""Recorded results of the public API, compared field by field.

`record.py` says how to record them again. Each `*_cases.py` defines one group of cases.
"""

import os

# As in tests/conftest.py. oneDNN reads this when torch is first used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
