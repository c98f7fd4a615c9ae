"""Every error that a user can cause: one line that says what is wrong and what would work."""

from __future__ import annotations

from typing import Self


class EqsatError(Exception):
    """Base of all errors.  `hint` is the remedy; `where` is "file:line" in the user's function, if it has one."""

    def __init__(self, message: str, hint: str | None = None, where: str | None = None):
        self.message, self.hint, self.where = message, hint, where
        super().__init__(self._text())

    def at(self, where: str) -> Self:
        """The same error with its place, once that is known."""
        self.where = where
        self.args = (self._text(),)
        return self

    def _text(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} ({self.hint})" if self.hint else text


class TraceError(EqsatError):
    """The user's function does something that a traced tensor cannot do."""


class ShapeError(TraceError):
    """Shapes or axes do not fit together."""


class DtypeError(TraceError):
    """A dtype is unknown or does not fit the operation."""


class InputError(EqsatError):
    """The arrays given to a compiled kernel (or to `evaluate`) do not match its specs."""


def wrong_index(position: float, extent: int, what: str = "an axis") -> InputError:
    """A position outside of 0 … extent-1, told as the user's index: negative ones have had the extent added, as they count from the
    end."""
    index = f"{position - extent:.0f} (position {position:.0f})" if position < 0 else f"{position:.0f}"
    return InputError(
        f"an index is out of range: {index} into {what} of extent {extent}", f"indices lie in {-extent} … {extent - 1}"
    )


class TargetError(EqsatError):
    """The target string is unknown."""


class RuleError(EqsatError):
    """A rewrite rule's declaration is malformed."""


class PlanError(EqsatError):
    """No plan could be found (for example under a memory limit)."""


class CompilerError(EqsatError):
    """Base of what the device compiler can raise."""


class CompilerNotFound(CompilerError):
    """No compiler for the target was found."""


class CompilationError(CompilerError):
    """The device compiler rejected the source; its log is part of the message."""


class DeviceError(EqsatError):
    """Base of what the driver or the device can raise."""


class DriverNotFound(DeviceError):
    """There is no driver, no device, or no PyCUDA."""


class WrongDevice(DeviceError):
    """Data lies on another device than the kernel runs on."""


class SavedKernelError(EqsatError):
    """A saved kernel cannot be read by this version."""
