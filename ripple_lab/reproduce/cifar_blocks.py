"""The paper's claims on CIFAR-100 and the README's results, at equal epochs."""

from collections.abc import Iterable
from dataclasses import dataclass

from ripple_lab.paper import ACCURACY, TOP1_OF_TABLE_8
from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import listed, markdown_table, rounded
from ripple_lab.reproduce.queries import Seeds, at_epochs
from ripple_lab.results import Results, committed_results

NOT_YET = "not yet run"
FULL, SHORT = 300, 60  # epochs
RIPPLE, RIPPLE4 = "cifar100-ripple-tiny", "cifar100-ripple-tiny4"
DEIT, DEIT_LA = "cifar100-deit-tiny", "cifar100-deit-la-tiny"
CONVIT = "cifar100-convit-tiny"
RESULTS = {
    "DeiT (softmax)": DEIT,
    "DeiT-LA (linear)": DEIT_LA,
    "ConViT (softmax)": CONVIT,
    "ripple": RIPPLE,
    "ripple, 4 layers": RIPPLE4,
}


@dataclass(frozen=True)
class Claim:
    """That `more` is above `less` by at least `margin` points, or with `at_most` by at most."""

    text: str
    more: str
    less: str
    margin: float = 0.01  # one of the 10,000 images
    at_most: bool = False

    def holds(self, difference: float) -> bool:
        return difference <= self.margin if self.at_most else difference >= self.margin


CLAIMS = (
    Claim("ripple is 5 points or more above DeiT-LA", RIPPLE, DEIT_LA, 5),
    Claim("ripple is 2.5 points or more above DeiT", RIPPLE, DEIT, 2.5),
    Claim("ripple is at most 1 point below ConViT", RIPPLE, CONVIT, -1),
    Claim("learned weights are better than truncated ones", RIPPLE, f"{RIPPLE}-truncated"),
    Claim("truncated weights are better than fixed ones", f"{RIPPLE}-truncated", f"{RIPPLE}-fixed"),
    Claim("stick-breaking is better than softmax weights", RIPPLE, f"{RIPPLE}-softmax"),
    Claim("R_max 4 is better than 2", RIPPLE, f"{RIPPLE}-r2"),
    Claim("R_max 4 is better than 8", RIPPLE, f"{RIPPLE}-r8"),
    Claim("R_max 4 is better than 16", RIPPLE, f"{RIPPLE}-r16"),
    Claim("logarithmic rings cost at most 1 point", RIPPLE, f"{RIPPLE}-logarithmic", 1, True),
    Claim("4 layers of ripple are no worse than 12 of DeiT-LA", RIPPLE4, DEIT_LA, 0),
    Claim("without positions ripple loses at most 2 points", RIPPLE, f"{RIPPLE}-no-ape", 2, True),
    Claim("without positions DeiT loses 8 points or more", DEIT, f"{DEIT}-no-ape", 8),
)


@block("claims-cifar100")
def claims() -> str:
    """Each claim, its verdict at 300 epochs, and the differences in points."""
    rows = []
    for claim in CLAIMS:
        both = (claim.more, claim.less)
        paper = [papers_top1(name, {*both} <= ACCURACY.keys()) for name in both]
        found = [difference(claim, epochs, committed_results()) for epochs in (FULL, SHORT)]
        differences = [paper[0] - paper[1], *found]
        rows.append([claim.text, verdict(claim, found[0]), *map(points, differences)])
    headings = ["claim", f"at {FULL} epochs", "the paper's difference"]
    headings += [f"ours, {epochs} epochs" for epochs in (FULL, SHORT)]
    used = {name: name for claim in CLAIMS for name in (claim.more, claim.less)}
    return f"{markdown_table(headings, rows, words=2)}\n\n{departures(used, (FULL,))}"


@block("readme-results")
def accuracy() -> str:
    """Top-1 of the paper and of ours after 300 and 60 epochs."""
    rows = []
    for label, recipe in RESULTS.items():
        ours = [at_epochs(recipe, epochs, committed_results()) for epochs in (FULL, SHORT)]
        paper = papers_top1(recipe, recipe in ACCURACY)
        rows.append([label, rounded(paper, 1), *map(with_seeds, ours)])
    headings = ["CIFAR-100, top-1 %", "paper, 300 epochs"]
    headings += [f"ours, {epochs} epochs" for epochs in (FULL, SHORT)]
    return f"{markdown_table(headings, rows)}\n\n{departures(RESULTS, (FULL, SHORT))}"


def papers_top1(recipe: str, of_table_2: bool) -> float:
    """Table 8 has other numbers than table 2 for the models of both."""
    return ACCURACY[recipe][0] if of_table_2 else TOP1_OF_TABLE_8[recipe]


def difference(claim: Claim, epochs: int, results: Results) -> float | None:
    """Points between a claim's two systems, None where one has not run so long."""
    more, less = (at_epochs(recipe, epochs, results) for recipe in (claim.more, claim.less))
    return more.mean("top1") - less.mean("top1") if more and less else None


def verdict(claim: Claim, found: float | None) -> str:
    """Confirmed, not confirmed, or not yet run."""
    if found is None:
        return NOT_YET
    return "confirmed" if claim.holds(found) else "not confirmed"


def points(number: float | None) -> str:
    """One decimal, or that it is not there yet."""
    return NOT_YET if number is None else rounded(number, 1).replace("-", "−")


def with_seeds(seeds: Seeds | None) -> str:
    """The mean; of several seeds their number."""
    if seeds is None:
        return NOT_YET
    count = f" ({len(seeds.runs)} seeds)" if len(seeds.runs) > 1 else ""
    return rounded(seeds.mean("top1"), 1) + count


def departures(recipes: dict[str, str], lengths: Iterable[int]) -> str:
    """One line on where runs left the paper's recipes, by name; no names where all of them did."""
    said = []
    for epochs in lengths:
        results = committed_results()
        runs = {label: at_epochs(name, epochs, results) for label, name in recipes.items()}
        found: dict[str, list[str]] = {}
        for label, seeds in runs.items():
            for field, change in seeds.departures.items() if seeds else ():
                if field != "epochs":
                    found.setdefault(f"`{field}` {change}", []).append(label)
        everyone = [label for label, seeds in runs.items() if seeds]
        for text, who in found.items():
            some = f" ({listed(who)})" if who != everyone else ""
            said.append(f"{text} at {epochs} epochs{some}")
    return f"Departures from the paper's recipe: {'; '.join(said) or 'none'}."
