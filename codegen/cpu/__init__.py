"""The `cpu` target: tile programs run by NumPy and BLAS, tile by tile, on a pool of threads.

    rewrite.py, factors.py   tile program → tile program that is simpler, or cheaper here
    frozen.py                … that needs no running maxima, for arguments whose norms say that no exponent is large
      invariance.py            what does not depend on a maximum
      estimates.py             how large an exponent is
    layout.py                types, order of axes, scratch memory
    frame.py, bind.py        statements → steps on the memory of one worker
    contract.py              contractions as matrix products
    functions.py             elementwise functions
    pool.py                  blocks on threads
    kernel.py                a plan's buffers and tile programs

Calls give the same bits each time: blocks are independent, and how a block is computed depends on nothing but its number.
"""

from .kernel import CpuKernel

__all__ = ["CpuKernel"]
