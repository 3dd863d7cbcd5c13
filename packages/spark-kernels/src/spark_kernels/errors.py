"""The root of every error that spark raises on purpose."""


class SparkError(Exception):
    """A failure that its message explains: what, got, wanted, what to do. Shown to users without a traceback."""


class KernelError(SparkError):
    """An op cannot do what it was asked."""


class UnsupportedShapeError(KernelError):
    """A shape, dtype or layout that no kernel of this op takes."""
