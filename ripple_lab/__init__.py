"""Around ripple attention: data, training, detection, pictures, benchmarks, the paper.

The library is `ripple_attention`; it never imports this package. Nothing is imported here, so that
the command `ripple` starts at once.
"""
