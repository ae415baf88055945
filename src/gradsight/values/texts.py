"""Small pieces of text that every report needs. No torch."""

from collections.abc import Sequence


def listed(names: Sequence[str], most: int) -> str:
    """The first few names, and how many more there are.

    >>> listed(["a", "b", "c"], most=3), listed(["a", "b", "c"], most=1)
    ('a, b, c', 'a and 2 more')
    """
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def quoted(names: Sequence[str]) -> list[str]:
    """Names as code of Markdown."""
    return [f"`{name}`" for name in names]


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "finding"), counted(2, "finding")
    ('1 finding', '2 findings')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"
