"""A number of ours as a table shows it: measured, with what is particular about it, or missing."""

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal


def rounded(number: float, decimals: int) -> str:
    """A number in so many decimals, up from the half on, as a reader of its file would round it.

    >>> rounded(56.15, 1), rounded(5770.0, 0)
    ('56.2', '5,770')
    """
    printed = Decimal(f"{number:.12g}")
    return f"{printed.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP):,}"


@dataclass(frozen=True)
class Measured:
    """One number, or one for each seed.

    Args:
        numbers: At least one.
        departs: Where it left the paper's setting, in a few words each: "20 epochs".
        source: What it is of, in a sentence: epochs, seeds, hardware, file.
        files: Of which it was read, relative to the folder of results.
        recipe: Whose training made it.
        commands: Where it departs, those that would make it in the paper's setting.
        in_full: The same after as many epochs as the paper's, where the table compares at fewer.
    """

    numbers: tuple[float, ...]
    departs: tuple[str, ...] = ()
    source: str = ""
    files: tuple[str, ...] = ()
    recipe: str = ""
    commands: tuple[str, ...] = ()
    in_full: "Measured | None" = None

    @property
    def mean(self) -> float:
        return sum(self.numbers) / len(self.numbers)

    def text(self, decimals: int) -> str:
        """Mean, range and particulars: "43.8, 43.5–44.1 (3 seeds, 20 epochs)".

        >>> Measured((44.1, 43.5), ("20 epochs",)).text(1)
        '43.8, 43.5–44.1 (2 seeds, 20 epochs)'
        >>> Measured((5770.0,)).text(0)
        '5,770'
        >>> Measured((50.26,), ("60 epochs",), in_full=Measured((69.16,), ("300 epochs",))).text(1)
        '69.2 (300 epochs); 50.3 (60 epochs)'
        """
        shown = rounded(self.mean, decimals)
        said = list(self.departs)
        if len(self.numbers) > 1:
            least, most = (rounded(x, decimals) for x in (min(self.numbers), max(self.numbers)))
            shown += f", {least}–{most}"
            said.insert(0, f"{len(self.numbers)} seeds")
        shown += f" ({', '.join(said)})" if said else ""
        return f"{self.in_full.text(decimals)}; {shown}" if self.in_full else shown

    def parts(self) -> list["Measured"]:
        """The numbers that are shown, each with its own source."""
        return [self.in_full, self] if self.in_full else [self]


@dataclass(frozen=True)
class Missing:
    """A number that is not there yet: the commands that make it, or why nothing does."""

    commands: tuple[str, ...] = ()
    why: str = ""

    def text(self, decimals: int = 0) -> str:
        return "not yet run" if self.commands else "–"


Value = Measured | Missing


def remedy(value: Value) -> str:
    """How a number is made that is missing or departs: "not yet run: `ripple train …`"."""
    commands = ", ".join(f"`{command}`" for command in value.commands)
    if isinstance(value, Missing):
        return f"not yet run: {commands}" if commands else value.why
    return f"in the paper's setting, not yet run: {commands}" if commands else ""
