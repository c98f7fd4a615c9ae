"""A tensor compiler by equality saturation: plain array code in, provably equal fused kernels out."""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import EqsatError
from .program import TensorSpec
from .trace import trace  # not lazy: the module of the same name would take its place when it is imported

if TYPE_CHECKING:
    from . import xp
    from .compiler import optimize
    from .kernel import Kernel, load
    from .reference import evaluate
    from .verification import verify

# public name → the module it is loaded from at first use (None: it is a module itself)
_LAZY: dict[str, str | None] = {
    "Kernel": "kernel",
    "evaluate": "reference",
    "load": "kernel",
    "optimize": "compiler",
    "verify": "verification",
    "xp": None,
}

__version__ = "0.1.0"

__all__ = ["EqsatError", "Kernel", "TensorSpec", "evaluate", "load", "optimize", "trace", "verify", "xp"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_LAZY[name] or name}", __name__)
    value = getattr(module, name) if _LAZY[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
