"""Garbage collection, put off while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def put_off() -> Iterator[None]:
    """No search for garbage cycles in here: each would walk all that is alive, to find next to nothing.  (Reference counts free what
    is in no cycle, as ever.)  Also a decorator."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
