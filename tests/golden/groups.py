"""The table of all groups."""

from golden import (
    dump_cases,
    ghost_cases,
    incident_cases,
    loop_cases,
    memory_cases,
    script_cases,
    zoo_cases,
)
from golden.results import Group

GROUPS: dict[str, Group] = {
    module.GROUP.name: module.GROUP
    for module in (
        loop_cases,
        zoo_cases,
        ghost_cases,
        memory_cases,
        dump_cases,
        incident_cases,
        script_cases,
    )
}
