"""Tables in Markdown, and numbers as they stand there."""

from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first columns are words, on the left, and the others numbers, on the right.

    >>> print(markdown_table(("name", "ms"), [("a", "1"), ("b", "2")]))
    | name | ms |
    |---|---:|
    | a | 1 |
    | b | 2 |
    """
    line = "".join("|---" if n < words else "|---:" for n in range(len(headings))) + "|"
    cells = [f"| {' | '.join(row)} |" for row in (headings, *rows)]
    return "\n".join([cells[0], line, *cells[1:]])


def rounded(number: float, decimals: int) -> str:
    """A number with that many decimals; halves round up, as a reader of its file would do it.

    >>> rounded(56.15, 1), rounded(5770.0, 0)
    ('56.2', '5,770')
    """
    printed = Decimal(f"{number:.12g}")
    return f"{printed.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP):,}"


def short(number: float | None) -> str:
    """Three digits, or a dash where there is no number.

    >>> short(0.01234), short(12.345), short(1234.5), short(None)
    ('0.0123', '12.3', '1,234', '–')
    """
    if not number:
        return "–"
    size = Decimal(f"{abs(number):.12g}").adjusted()
    return rounded(number, max(0, 2 - size)) if size < 3 else f"{number:,.0f}"


def listed(words: Sequence[str]) -> str:
    """Words as a sentence lists them.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
