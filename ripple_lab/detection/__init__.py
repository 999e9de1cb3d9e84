"""Object detection: SMCA with softmax, linear or ripple attention in its encoder.

An image passes through `backbone` → `positions` → `encoder` → `decoder`; `model` puts them together
by name.
"""
