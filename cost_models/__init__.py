"""Cost models: machine descriptions as data, and what a tile program costs on them."""

from .base import CostModel, Scores, Sizes, Work
from .machines import Cpu, Gpu, machine_for

__all__ = ["CostModel", "Cpu", "Gpu", "Scores", "Sizes", "Work", "machine_for", "model_for"]


def model_for(target: str) -> CostModel:
    """The analytic model of a target ("cpu", "cuda:sm_90a", "hip:gfx942", …)."""
    machine = machine_for(target)
    if isinstance(machine, Cpu):
        from .host import HostModel

        return HostModel(machine)
    from .roofline import Roofline

    return Roofline(machine)
