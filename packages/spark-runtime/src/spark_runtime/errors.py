"""Errors of the device layer."""

from spark_kernels.errors import SparkError


class DeviceError(SparkError):
    """The device, its driver or its memory failed or is not there."""


class OutOfMemoryError(DeviceError):
    """The memory plan does not fit; the message names the option that would make it fit."""


class OutOfBlocksError(DeviceError):
    """The KV pool has no free block left."""
