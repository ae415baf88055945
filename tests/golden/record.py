"""Record the golden results with the installed version of Gradsight.

    python tests/golden/record.py [GROUP...]

The groups are loops, zoo, ghost, memory, dumps, incidents and scripts; without a name, all are recorded.
Each is written to tests/golden/GROUP.json, and every field that changed is printed.

`test_golden.py` runs the same cases and compares every field with these files. If you change
behaviour deliberately, record the group again in the same commit and give the reason in the commit
message. If you did not mean to change anything, a difference is a bug: do not record it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.groups import GROUPS
from golden.results import Group, as_json


def main() -> None:
    names = sys.argv[1:] or list(GROUPS)
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        sys.exit(f"unknown group {unknown[0]!r}; the groups are {', '.join(GROUPS)}")
    for name in names:
        record(GROUPS[name])


def record(group: Group) -> None:
    """Run all cases of a group, print what changed, and write the file."""
    before = group.stored() if group.file.exists() else {}
    results = {}
    for number, case in enumerate(group.cases, 1):
        print(f"{group.name} {number} of {len(group.cases)}: {case}", file=sys.stderr, flush=True)
        results[case] = group.run(case)
        if case in before:
            print(*group.differences(case, before[case], results[case]), sep="\n", end="")
    group.file.write_text(as_json(results) + "\n", encoding="utf-8")
    print(f"{group.file.name}: {len(results)} cases")


if __name__ == "__main__":
    main()
