"""HIP: the CUDA emitter over other device headers."""

from .arch import hip_arch, hip_emulator

__all__ = ["hip_arch", "hip_emulator"]
