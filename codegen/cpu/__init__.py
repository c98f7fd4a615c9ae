"""The `cpu` target: tile programs run by NumPy and BLAS, tile by tile, on a pool of threads.

    rewrite.py    tile program → tile program that is cheaper here
    layout.py     types, order of axes, scratch memory
    contract.py   contractions as matrix products
    functions.py  elementwise functions
    bind.py       statements → steps on given memory
    pool.py       blocks on threads

Calls give the same bits each time: blocks are independent, and how a block is computed depends on nothing but its number.
"""

from .kernel import CpuKernel

__all__ = ["CpuKernel"]
