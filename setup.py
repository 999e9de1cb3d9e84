"""Copies the result files into the package, for `ripple reproduce`. The rest: pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithResults(build_py):
    """Copies benchmarks/results to ripple_lab/results_data, which a checkout does not need."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "ripple_lab" / "results_data"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("benchmarks/results", target)


setup(cmdclass={"build_py": BuildWithResults})
