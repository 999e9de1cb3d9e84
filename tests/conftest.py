"""Before torch is imported: what all tests, and the processes they start, shall know."""

import os

# Virtual machines may promise AMX and forbid it: products of bfloat16 would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
