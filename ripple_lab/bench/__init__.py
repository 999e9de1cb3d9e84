"""Benchmarks: ratios measured side by side in one run, checked before they are timed."""
