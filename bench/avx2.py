"""Run a module as on a CPU that has AVX2, but neither AVX-512 nor instructions for int8 or bf16.

python -m bench.avx2 bench.format_rates --output docs/benchmarks/format_rates_no_avx512.json
"""

from __future__ import annotations

import os
import runpy
import sys

import llvmlite.binding

#: what torch, oneDNN and numba would use beyond AVX2
_NEWER = ("avx512", "avxvnni", "amx", "avxifma", "avxneconvert")


def restrict() -> None:
    """Hide newer instructions from this process; before torch and numba are imported."""
    assert "torch" not in sys.modules and "numba" not in sys.modules
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    features = llvmlite.binding.get_host_cpu_features()
    features |= dict.fromkeys((name for name in features if name.startswith(_NEWER)), False)
    llvmlite.binding.get_host_cpu_features = lambda: features


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    restrict()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")
