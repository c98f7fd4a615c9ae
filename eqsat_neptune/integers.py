"""Floats as integers, where results are stored."""

from __future__ import annotations

import numpy as np

_ENDS = np.iinfo(np.int64)


def wrapped(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Each float without its fraction, modulo 2^bits, as NumPy's integers wrap around; 0 where it is no number or infinite.

    A conversion by NumPy alone is undefined beyond the range of the dtype: it saturates, or wraps, as the processor likes."""
    with np.errstate(invalid="ignore"):
        whole = x.astype(np.int64)
        if whole.size and (whole.min() == _ENDS.min or whole.max() == _ENDS.max):  # some do not fit
            rest = np.nan_to_num(np.fmod(x.astype(np.float64), 2.0**64), nan=0.0)
            size = np.abs(rest).astype(np.uint64)
            return np.where(rest < 0, -size, size).astype(dtype)
        return whole.astype(dtype, copy=False)
