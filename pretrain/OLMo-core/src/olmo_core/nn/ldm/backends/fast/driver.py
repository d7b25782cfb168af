"""
Load compiled kernels and launch them through the CUDA driver, with :mod:`ctypes`: no package is needed besides torch. A
kernel takes addresses (64 bits), counts (32 bits) and FP32 numbers, so its arguments are a plain C structure.
"""

import ctypes
import struct
import threading
from functools import cache
from typing import Any

import torch

_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PORTABLE_CLUSTER = 8
"""The largest cluster that every device takes."""
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_TYPES = {"p": "Q", "i": "i", "f": "f"}
"""In :mod:`struct`'s letters; its native layout is that of a C structure."""


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("x", ctypes.c_uint),
        ("y", ctypes.c_uint),
        ("z", ctypes.c_uint),
        ("rest", ctypes.c_char * 52),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        message = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"the CUDA driver: {what} failed: {message} (CUDA error {status})")


def argument_layout(arguments: str) -> tuple[struct.Struct, list[int]]:
    """
    :param arguments: As of :class:`Kernel`.

    :returns: The layout of the arguments in memory, and where each begins.
    """
    letters = [_TYPES[t] for t in arguments]
    offsets = [
        struct.calcsize("".join(letters[: i + 1])) - struct.calcsize(letter)
        for i, letter in enumerate(letters)
    ]
    return struct.Struct("".join(letters)), offsets


class Kernel:
    """
    A compiled kernel on one device.

    :param cubin: The machine code.
    :param entry: The kernel's name in it.
    :param arguments: One letter for each: ``p`` an address or an offset of 64 bits, ``i`` ``int32``, ``f`` ``float32``.
    :raises RuntimeError: If the driver refuses it; the message has the driver's reason.
    """

    def __init__(
        self,
        cubin: bytes,
        entry: str,
        arguments: str,
        *,
        device: int,
        threads: int,
        shared_bytes: int = 0,
        cluster: int = 1,
    ):
        self.device, self.cluster = device, cluster
        driver = _driver()
        self._launch = driver.cuLaunchKernelEx
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes a context, and makes it current
            _check(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {entry}")
            _check(
                driver.cuModuleGetFunction(ctypes.byref(self._function), module, entry.encode()),
                f"finding {entry}",
            )
            _check(
                driver.cuFuncSetAttribute(self._function, _DYNAMIC_SHARED_BYTES, shared_bytes),
                f"giving {entry} {shared_bytes} bytes of shared memory",
            )
            if cluster > PORTABLE_CLUSTER:
                _check(
                    driver.cuFuncSetAttribute(self._function, _LARGE_CLUSTERS, 1),
                    f"allowing {entry} clusters of {cluster} blocks",
                )
        self._layout, offsets = argument_layout(arguments)
        self._values = ctypes.create_string_buffer(self._layout.size)
        base = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + o for o in offsets))
        attributes = [_Attribute(id=_OVERLAP, x=1)]
        if cluster > 1:
            attributes.insert(0, _Attribute(id=_CLUSTER_DIMENSION, x=cluster, y=1, z=1))
        self._attributes = (_Attribute * len(attributes))(*attributes)
        self._n_attributes = len(attributes) - 1
        self._config = _Config(
            (1, 1, 1),
            (threads, 1, 1),
            shared_bytes,
            None,
            self._attributes,
            self._n_attributes,
        )
        self._lock = threading.Lock()

    def max_clusters(self) -> int:
        """Clusters (blocks, without clusters) that the device runs at the same time."""
        n = ctypes.c_int()
        if self.cluster == 1:
            return torch.cuda.get_device_properties(self.device).multi_processor_count
        self._config.grid[0] = self.cluster
        self._config.n_attributes = self._n_attributes
        with torch.cuda.device(self.device):
            status = _driver().cuOccupancyMaxActiveClusters(
                ctypes.byref(n), self._function, ctypes.byref(self._config)
            )
        _check(status, "asking for the number of clusters")
        return n.value

    def __call__(self, blocks: int, *values: Any, overlap: bool = False) -> None:
        """
        Launch on torch's current stream of the device.

        :param blocks: A multiple of the cluster.
        :param values: The arguments, addresses by ``data_ptr()``.
        :param overlap: The kernel may start while the one before it in the stream ends: it must wait by itself
            (``griddepcontrol.wait``) before it touches what others write or read.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        # One set of arguments for each kernel: the driver has copied them when it returns.
        with self._lock:
            # In one call: setting the fields of a C structure one by one takes three times as long.
            self._layout.pack_into(self._values, 0, *values)
            self._config.grid[0] = blocks
            self._config.stream = stream
            self._config.n_attributes = self._n_attributes + overlap
            launch = (ctypes.byref(self._config), self._function, self._pointers, None)
            status = self._launch(*launch)
            if status == _INVALID_CONTEXT:
                # A thread that has not used the device yet.
                torch.cuda.current_stream(self.device).query()
                status = self._launch(*launch)
        if status:
            _check(status, "a launch")
