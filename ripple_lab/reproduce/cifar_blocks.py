"""Blocks on CIFAR-100: the paper's claims at equal epochs, the README's results, the page's."""

from collections.abc import Iterable
from dataclasses import dataclass

from ripple_lab.paper import ACCURACY, TOP1_OF_TABLE_8
from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import listed, markdown_table, rounded
from ripple_lab.reproduce.queries import Seeds, at_epochs, best, settings
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
SYSTEMS = {"DeiT-LA": DEIT_LA, "DeiT": DEIT, "ConViT": CONVIT, "ripple": RIPPLE}
# No recipe of its own: DeiT of four layers.
DEPTHS = {"DeiT-LA, 4 layers": f"{DEIT_LA}4", "DeiT, 4 layers": "", "ripple, 4 layers": RIPPLE4}
SETUPS = {
    "ripple, R_max 4": RIPPLE,
    "R_max 2": f"{RIPPLE}-r2",
    "R_max 8": f"{RIPPLE}-r8",
    "R_max 16": f"{RIPPLE}-r16",
    "logarithmic rings": f"{RIPPLE}-logarithmic",
    "fixed weights": f"{RIPPLE}-fixed",
    "softmax weights": f"{RIPPLE}-softmax",
    "truncated: nothing beyond R_max": f"{RIPPLE}-truncated",
    "DeiT-LA": DEIT_LA,
}
SCHEDULES = (
    ("light augmentation, 20 epochs", "cifar100-20", 20),
    ("the paper's, 60 epochs", "cifar100-short", 60),
    ("the paper's, 100 epochs", "cifar100-short", 100),
    ("light augmentation, 60 epochs", "cifar100-20", 60),
    ("the paper's, 300 epochs", "cifar100", 300),
)


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
        # Table 8 has other numbers than table 2 for the models of both.
        paper = [papers_top1(name) for name in both]
        if RIPPLE4 in both:
            paper = [TOP1_OF_TABLE_8[name] for name in both]
        found = [difference(claim, epochs, committed_results()) for epochs in (FULL, SHORT)]
        differences = [minus(*paper), *found]
        rows.append([claim.text, verdict(claim, found[0])])
        rows[-1] += [NOT_YET if x is None else percent(x) for x in differences]
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
        rows.append([label, percent(papers_top1(recipe)), *map(with_seeds, ours)])
    headings = ["CIFAR-100, top-1 %", "paper, 300 epochs"]
    headings += [f"ours, {epochs} epochs" for epochs in (FULL, SHORT)]
    return f"{markdown_table(headings, rows)}\n\n{departures(RESULTS, (FULL, SHORT))}"


@block("cifar100-300-epochs")
def by_depth() -> str:
    """Top-1 of the systems after 60 and 300 epochs, and the paper's after 300."""
    return ours_and_the_papers(DEPTHS | SYSTEMS)


@block("cifar100-setups")
def by_setup() -> str:
    """What each part of ripple attention is worth."""
    return ours_and_the_papers(SETUPS)


def ours_and_the_papers(recipes: dict[str, str]) -> str:
    """A row for each recipe."""
    lines = []
    for name, recipe in recipes.items():
        ours = [top1(recipe, epochs) if recipe else deit_of_four_layers(epochs)
                for epochs in (SHORT, FULL)]  # fmt: skip
        lines.append([name, *map(percent, (*ours, papers_top1(recipe)))])
    return markdown_table(["top-1 %", "ours, 60 epochs", "ours, 300", "the paper, 300"], lines)


@block("cifar100-no-positions")
def without_positions() -> str:
    """What a model loses without position embeddings."""
    lines = []
    for name, recipe in SYSTEMS.items():
        both = (recipe, f"{recipe}-no-ape")
        pairs = [[top1(it, epochs) for it in both] for epochs in (SHORT, FULL)]
        pairs.append([papers_top1(it) for it in both])
        changes = [signed(minus(without, given)) for given, without in pairs]
        lines.append([name, *map(percent, pairs[0]), *changes])
    headings = ["top-1 %, 60 epochs", "with positions", "without", "change"]
    return markdown_table([*headings, "after 300 epochs", "in the paper"], lines)


@block("cifar100-schedules")
def by_schedule() -> str:
    """How far ripple and DeiT-LA are from DeiT, by schedule."""
    systems = (DEIT, RIPPLE, DEIT_LA)
    found = {
        name: [own_top1(recipe.replace("cifar100", prefix), epochs) for recipe in systems]
        for name, prefix, epochs in SCHEDULES
    }
    found["the paper's own results"] = [papers_top1(recipe) for recipe in systems]
    lines = [
        [name, percent(deit), *(signed(minus(other, deit)) for other in others)]
        for name, (deit, *others) in found.items()
    ]
    return markdown_table(["schedule", "DeiT, top-1 %", "ripple's lead", "DeiT-LA's lead"], lines)


@block("cifar100-seeds")
def by_seed() -> str:
    """Top-1 of several seeds after 60 epochs."""
    lines = []
    for name in ("DeiT", "ripple"):
        seeds = at_epochs(SYSTEMS[name], SHORT, committed_results())
        assert seeds
        runs = ", ".join(f"{run['top1']:.2f}" for run in seeds.runs)
        lines.append([name, runs, percent(seeds.mean("top1"))])
    return markdown_table(["top-1 %", "seeds 0, 1, …", "mean"], lines)


@block("cifar100-changed-models")
def by_changed_model() -> str:
    """Runs of 60 epochs in which one field of a recipe's model was changed."""
    lines = []
    for run in committed_results().of_kind("runs"):
        field, _, values = run["changes"].partition(": ")
        short = run["recipe"].startswith("cifar100-short") and run["epochs"] == SHORT
        usual = own_top1(run["recipe"], SHORT)
        if short and field.startswith("model.") and ";" not in values and usual is not None:
            changed = float(run["top1"])
            name = f"`{run['recipe']}`, `{field}` {values}"
            lines.append([name, *map(percent, (usual, changed)), signed(minus(changed, usual))])
    return markdown_table(["top-1 %, 60 epochs", "as it is", "changed", "change"], lines)


def top1(recipe: str, epochs: int, results: Results | None = None) -> float | None:
    """Top-1 of a recipe's model after that many epochs, the mean of its seeds."""
    seeds = at_epochs(recipe, epochs, results or committed_results())
    return seeds.mean("top1") if seeds else None


def own_top1(recipe: str, epochs: int) -> float | None:
    """Of the runs of this recipe itself, not of others with the same model."""
    runs = [it for it in settings(recipe, "top1", committed_results()) if it.recipe == recipe]
    found = best(runs, epochs)
    return found.mean("top1") if found else None


def deit_of_four_layers(epochs: int) -> float | None:
    """Of recipes of DeiT whose depth was changed."""
    for run in committed_results().of_kind("runs"):
        named = run["recipe"].startswith("cifar100") and run["recipe"].endswith("-deit-tiny")
        if named and run["epochs"] == epochs and "model.depth: None → 4" in run["changes"]:
            return float(run["top1"])
    return None


def papers_top1(recipe: str) -> float | None:
    """Table 2's or 4's, else table 8's."""
    return ACCURACY[recipe][0] if recipe in ACCURACY else TOP1_OF_TABLE_8.get(recipe)


def difference(claim: Claim, epochs: int, results: Results) -> float | None:
    """Points between a claim's two systems, None where one has not run so long."""
    return minus(*(top1(recipe, epochs, results) for recipe in (claim.more, claim.less)))


def minus(number: float | None, other: float | None) -> float | None:
    """How much more the one is than the other, where both are there."""
    return None if number is None or other is None else number - other


def verdict(claim: Claim, found: float | None) -> str:
    """Confirmed, not confirmed, or not yet run."""
    if found is None:
        return NOT_YET
    return "confirmed" if claim.holds(found) else "not confirmed"


def percent(number: float | None) -> str:
    """One decimal, or a dash."""
    return "–" if number is None else rounded(number, 1).replace("-", "−")


def signed(number: float | None) -> str:
    """The same with its sign."""
    return "+" * (number is not None and number > 0) + percent(number)


def with_seeds(seeds: Seeds | None) -> str:
    """The mean; of several seeds their number."""
    if seeds is None:
        return NOT_YET
    count = f" ({len(seeds.runs)} seeds)" if len(seeds.runs) > 1 else ""
    return percent(seeds.mean("top1")) + count


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
