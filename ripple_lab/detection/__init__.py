"""Object detection: SMCA with softmax, linear or ripple attention in its encoder.

An image's way through the files: `backbone` → `positions` → `encoder` → `decoder`, put together by
name in `model`.
"""
