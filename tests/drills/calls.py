"""Invalid calls of the library's public functions: the table that its tests go over."""

from drills import drill


@drill("invalid calls", "a ValueError or TypeError says the rule, what came and the remedy")
def invalid_calls(folder, short):
    from library import test_invalid_calls as table

    for kind in table.KINDS:
        for name, calls in kind():
            for what, call in dict(calls).items():
                wrong = table.complaint(call)
                yield name, f"{what}: {wrong}" if wrong else ""
