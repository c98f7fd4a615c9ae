"""Cost models: machine descriptions as data, and what a tile program costs on them."""

from collections.abc import Mapping

from ..codegen.tile import TileProgram
from ..extraction.plan import Buffer
from .base import CostModel, Printed, Refusal, Scores, Sizes, Work
from .machines import Cpu, Gpu, machine_for

__all__ = ["CostModel", "Cpu", "Gpu", "Refusal", "Scores", "Sizes", "Work", "machine_for", "model_for"]


def model_for(target: str) -> CostModel:
    """The analytic model of a target ("cpu", "cuda:sm_90a", "hip:gfx942", …)."""
    machine = machine_for(target)
    if isinstance(machine, Cpu):
        from .host import HostModel

        return HostModel(machine)
    from .roofline import Roofline

    return Roofline(machine, printed=_printed(target))


def _printed(target: str) -> Printed:
    """What the code generator of a GPU target says of a kernel.  It is loaded when first asked."""

    def ask(program: TileProgram, buffers: Mapping[str, Buffer]) -> Refusal | None:
        from ..codegen.cuda.arch import cuda_arch
        from ..codegen.cuda.emit import refusal
        from ..codegen.hip.arch import hip_arch

        kind, _, arch = target.partition(":")
        return refusal(program, buffers, cuda_arch(arch) if kind == "cuda" else hip_arch(arch))

    return ask
