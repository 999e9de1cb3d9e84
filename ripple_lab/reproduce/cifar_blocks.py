"""Blocks on CIFAR-100: accuracy by schedule, what was varied, and the paper's claims beside it."""

from collections.abc import Iterable
from dataclasses import dataclass

from ripple_lab.paper import ACCURACY, TOP1_OF_TABLE_8
from ripple_lab.recipes import all_recipes
from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import listed, markdown_table, rounded
from ripple_lab.reproduce.queries import Seeds, at_epochs, best, settings
from ripple_lab.results import Results, committed_results

NOT_YET = "not yet run"
FULL, SHORT = 300, 60
PAPER_TOP1 = {name: numbers[0] for name, numbers in ACCURACY.items() if name[:5] == "cifar"}
PAPER_TOP1 |= {name: top1 for name, top1 in TOP1_OF_TABLE_8.items() if name not in PAPER_TOP1}
SYSTEMS = {"deit": "DeiT", "deit-la": "DeiT-LA", "convit": "ConViT", "ripple": "ripple"}


@block("cifar100-full")
def full_length() -> str:
    """Every CIFAR-100 row of the paper's tables, at its 300 epochs."""
    return _accuracy(FULL)


@block("cifar100-short")
def sixty_epochs() -> str:
    """The same rows after 60 epochs."""
    return _accuracy(SHORT)


@block("cifar100-schedules")
def schedules() -> str:
    """How far ripple and DeiT-LA are from DeiT, by schedule."""
    rows = []
    for label, prefix, epochs in (
        ("crop, flip, mixup and cutmix, 20 epochs", "cifar100-20", 20),
        ("crop, flip, mixup and cutmix, 60 epochs", "cifar100-20", 60),
        ("the paper's at twice the learning rate, 60 epochs", "cifar100-short", 60),
        ("the paper's at twice the learning rate, 100 epochs", "cifar100-short", 100),
        ("the paper's, 300 epochs", "cifar100", FULL),
    ):
        recipes = [f"{prefix}-{system}-tiny" for system in ("deit", "ripple", "deit-la")]
        rows.append([label, *_leads([_own(recipe, epochs) for recipe in recipes])])
    paper = [PAPER_TOP1[f"cifar100-{system}-tiny"] for system in ("deit", "ripple", "deit-la")]
    rows.append(["the paper", *_leads(paper)])
    return markdown_table(("schedule", "DeiT, top-1 %", "ripple's lead", "DeiT-LA's"), rows)


@block("cifar100-no-positions")
def without_positions() -> str:
    """What each system loses without position embeddings."""
    rows = []
    for system, title in SYSTEMS.items():
        names = f"cifar100-{system}-tiny", f"cifar100-{system}-tiny-no-ape"
        losses = [_minus(PAPER_TOP1[names[0]], PAPER_TOP1[names[1]])]
        for epochs in (FULL, SHORT):
            losses.append(_minus(*(top1(name, epochs) for name in names)))
        rows.append([title, *map(points, losses)])
    headings = ("points lost", "the paper", f"ours, {FULL} epochs", f"ours, {SHORT} epochs")
    return markdown_table(headings, rows)


@block("cifar100-variants")
def variants() -> str:
    """Runs whose model is not the recipe's, beside the recipe's own at equal epochs."""
    rows = []
    for run in committed_results().of_kind("runs"):
        changed = [
            change.removeprefix("model.")
            for change in run["changes"].split("; ")
            if change.startswith("model.") and not change.startswith("model.implementation")
        ]
        if changed and run["recipe"].startswith("cifar100"):
            own = _own(run["recipe"], run["epochs"])
            cells = [f"`{run['recipe']}`", f"`{'; '.join(changed)}`", str(run["epochs"])]
            rows.append([*cells, rounded(run["top1"], 1), points(own)])
    headings = ("recipe", "changed", "epochs", "top-1 %", "without the change")
    return markdown_table(headings, rows, words=2)


@dataclass(frozen=True)
class Claim:
    """`more` is at least `margin` points above `less`; with `at_most`, at most so many."""

    text: str
    more: str
    less: str
    margin: float = 0.0
    at_most: bool = False

    def holds(self, difference: float) -> bool:
        return difference <= self.margin if self.at_most else difference >= self.margin


BETTER = 0.01  # one of the 10,000 images
RIPPLE, RIPPLE4 = "cifar100-ripple-tiny", "cifar100-ripple-tiny4"
DEIT, DEIT_LA = "cifar100-deit-tiny", "cifar100-deit-la-tiny"
CLAIMS = (
    Claim("ripple is 5 points or more above DeiT-LA", RIPPLE, DEIT_LA, 5),
    Claim("ripple is 2.5 points or more above DeiT", RIPPLE, DEIT, 2.5),
    Claim("ripple is at most 1 point below ConViT", RIPPLE, "cifar100-convit-tiny", -1),
    Claim("learned weights are better than truncated ones", RIPPLE, f"{RIPPLE}-truncated", BETTER),
    Claim(
        "truncated weights are better than fixed ones",
        f"{RIPPLE}-truncated",
        f"{RIPPLE}-fixed",
        BETTER,
    ),
    Claim("stick-breaking is better than softmax weights", RIPPLE, f"{RIPPLE}-softmax", BETTER),
    Claim("R_max 4 is better than 2", RIPPLE, f"{RIPPLE}-r2", BETTER),
    Claim("R_max 4 is better than 8", RIPPLE, f"{RIPPLE}-r8", BETTER),
    Claim("R_max 4 is better than 16", RIPPLE, f"{RIPPLE}-r16", BETTER),
    Claim("logarithmic rings cost at most 1 point", RIPPLE, f"{RIPPLE}-logarithmic", 1, True),
    Claim("4 layers of ripple are no worse than 12 of DeiT-LA", RIPPLE4, DEIT_LA),
    Claim("without positions ripple loses at most 2 points", RIPPLE, f"{RIPPLE}-no-ape", 2, True),
    Claim("without positions DeiT loses 8 points or more", DEIT, f"{DEIT}-no-ape", 8),
)


@block("claims-cifar100")
def claims() -> str:
    """Each claim at equal epochs; the verdict is that of 300."""
    rows = []
    for claim in CLAIMS:
        both = PAPER_TOP1 if {claim.more, claim.less} <= ACCURACY.keys() else TOP1_OF_TABLE_8
        paper = both[claim.more] - both[claim.less]
        found = [difference(claim, epochs, committed_results()) for epochs in (FULL, SHORT)]
        rows.append([claim.text, verdict(claim, found[0]), points(paper), *map(points, found)])
    headings = ("claim", f"at {FULL} epochs", "the paper's difference")
    headings += (f"ours, {FULL} epochs", f"ours, {SHORT} epochs")
    runs = [(n, at_epochs(n, FULL, committed_results())) for n in (RIPPLE, RIPPLE4, DEIT)]
    return f"{markdown_table(headings, rows, words=2)}\n\n{departures_note(runs)}"


def difference(claim: Claim, epochs: int, results: Results) -> float | None:
    """Points between a claim's two systems, None where one has not run so long."""
    found = [at_epochs(recipe, epochs, results) for recipe in (claim.more, claim.less)]
    means = [seeds.mean("top1") if seeds else None for seeds in found]
    return _minus(means[0], means[1])


def verdict(claim: Claim, found: float | None) -> str:
    """Confirmed, not confirmed, or not yet run."""
    if found is None:
        return NOT_YET
    return "confirmed" if claim.holds(found) else "not confirmed"


def top1(recipe: str, epochs: int) -> float | None:
    """The mean of a recipe's model after so many epochs."""
    seeds = at_epochs(recipe, epochs, committed_results())
    return seeds.mean("top1") if seeds else None


def points(number: float | None) -> str:
    """One decimal, or that it is not there yet."""
    return NOT_YET if number is None else rounded(number, 1).replace("-", "−")


def departures_note(shown: Iterable[tuple[str, Seeds | None]]) -> str:
    """One line on where runs left the paper's recipe; who did only where not all of them did."""
    found: dict[tuple[int, str], list[str]] = {}
    names: dict[int, list[str]] = {}
    for name, seeds in shown:
        if seeds:
            names.setdefault(seeds.epochs, []).append(name)
            for field, change in seeds.departures.items():
                if field != "epochs":
                    found.setdefault((seeds.epochs, f"`{field}` {change}"), []).append(name)
    said = [
        f"{text} at {epochs} epochs" + (f" ({listed(who)})" if who != names[epochs] else "")
        for (epochs, text), who in found.items()
    ]
    return f"Departures from the paper's recipe: {'; '.join(said) or 'none'}."


def seeds_text(seeds: Seeds | None) -> str:
    """The mean; of several seeds their number."""
    if seeds is None:
        return NOT_YET
    count = f" ({len(seeds.runs)} seeds)" if len(seeds.runs) > 1 else ""
    return rounded(seeds.mean("top1"), 1) + count


def _accuracy(epochs: int) -> str:
    rows, runs = [], []
    for recipe, paper in PAPER_TOP1.items():
        seeds, label = at_epochs(recipe, epochs, committed_results()), all_recipes()[recipe].shows
        cells = [NOT_YET, "–", "–", "–"]
        if seeds:
            norm = max(run["gradient_norm_max"] for run in seeds.runs)
            cells = [seeds.text("top1"), seeds.text("top5"), rounded(norm, 1), str(len(seeds.runs))]
            runs.append((label.partition(", ")[2], seeds))
        rows.append([label, rounded(paper, 1), *cells])
    headings = ("system", "paper, top-1 %", f"ours, {epochs} epochs, top-1 %", "top-5 %")
    table = markdown_table((*headings, "largest gradient norm", "seeds"), rows)
    return f"{table}\n\n{departures_note(runs)}"


def _own(recipe: str, epochs: int) -> float | None:
    """The mean of a recipe's own runs, by no other recipe."""
    runs = [it for it in settings(recipe, "top1", committed_results()) if it.recipe == recipe]
    seeds = best(runs, epochs)
    return seeds.mean("top1") if seeds else None


def _leads(found: list[float | None]) -> list[str]:
    base, *others = found
    return [points(base), *(points(_minus(other, base)) for other in others)]


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
