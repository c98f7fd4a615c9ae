"""The algebra: rewrite rules and analyses as data, and the derivation of merges."""

from .declared import RULES
from .rule import Rule

__all__ = ["RULES", "Rule"]
