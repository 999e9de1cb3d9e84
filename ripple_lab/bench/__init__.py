"""Benchmarks: systems are checked, then timed in turns within one run."""
