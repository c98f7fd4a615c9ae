"""The search for the cheapest legal plan."""

from .extract import Candidate, Extraction, extract
from .plan import Axis, Buffer, Cost, Kernel, Plan, Store
from .search import Limits

__all__ = ["Axis", "Buffer", "Candidate", "Cost", "Extraction", "Kernel", "Limits", "Plan", "Store", "extract"]
