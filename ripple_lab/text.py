"""Text from files, made safe to show: the name of a class or a picture may hold anything."""

import re
from collections.abc import Sequence

LONGEST = 200  # characters of a name


def plain(text: str, most: int | None = None, keep: str = "") -> str:
    r"""Text that only shows: control characters and invisible ones become escapes.

    Args:
        text: Whatever a file holds.
        most: Cut after so many characters; never unless given.
        keep: Characters that stay, as "\n".

    >>> plain("rose\x1b[2J\n")
    'rose\\x1b[2J\\n'
    """
    if most is not None and len(text) > most:
        text = text[:most] + "…"
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def markdown(text: str) -> str:
    r"""Text that Markdown and HTML show as it is.

    >>> markdown("<b>|*tea_rose*")
    '\\<b\\>\\|\\*tea_rose\\*'
    """
    return re.sub(r"([\\`*\[\]<>&#|~$!]|\b_|_\b)", r"\\\1", plain(text))


def check_names(names: Sequence[str], count: int, source: str) -> None:
    """Refuses names that are not those of a model's classes: one each, none of them a book."""
    if len(names) != count:
        raise ValueError(
            f"a model needs one name for each of its {count} classes; {source} has {len(names)}: "
            "give it its own names, as `ripple train` and `ripple pack` write them"
        )
    longest = max(map(len, names), default=0)
    if longest > LONGEST:
        raise ValueError(
            f"the name of a class may have {LONGEST} characters; {source} has one of {longest:,}: "
            "give its classes shorter names"
        )
