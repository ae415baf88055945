"""gradsight explain CODE"""

from gradsight.health.explanation import explained, listed_checks


def explain(code: str | None = None, /) -> int:
    """Print what a check looks at, why, how it is judged with its settings, and what mends it.

    Without a code: all checks with a line each. Exits with 64 for a code that there is not.

    Parameters
    ----------
    code
        The code of a finding, such as GS401.
    """
    if code is None:
        print(listed_checks())
    else:
        print(explained(code))
    return 0
