"""Checks that every specification shares: they name the rule, the field and what came."""


def fraction(**values: float) -> None:
    """Refuses values outside 0 to 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie between 0 and 1; got {name}={value}")


def at_least(least: float, **values: float) -> None:
    """Refuses values below the least, and NaN."""
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}; got {name}={value}")


def at_most(most: float, **values: float) -> None:
    """Refuses values above the most, and NaN."""
    for name, value in values.items():
        if not value <= most:
            raise ValueError(f"{name} must be at most {most}; got {name}={value}")
