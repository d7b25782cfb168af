"""
Packed parameters, kept as long as the parameters live. A boundary's launch then is the only one: the pack kernel of the training
backends costs as much as the boundary itself at a few tokens.
"""

import weakref

import torch

from ..reference import LDMParameters
from .layout import Spec, pack

Tensor = torch.Tensor


class Packed:
    """
    A boundary's parameters in the layouts of the two kernels. They are packed when first asked for, and again when a parameter is
    another tensor or was changed in place, as its version counter tells. It does not count what is written through ``.data`` or
    by a replayed CUDA graph: :func:`forget` after such a change.

    Both layouts, if both are used, are packed anew together and in their old places: a CUDA graph that was captured before has the
    new values from the next call outside of a graph on.
    """

    def __init__(self) -> None:
        self._key: list[int] | None = None
        self._buffers: dict[str, Tensor] = {}
        self._spec: Spec | None = None
        self._options = ""

    def invalidate(self) -> None:
        self._key = None

    def _make(self, name: str, parameters: LDMParameters, gain: Tensor) -> Tensor:
        if name == "fragments":
            assert self._spec is not None
            return pack(self._spec, parameters, gain)
        from ..fast import ops

        return ops.pack_parameters(parameters, gain, self._options)

    def _get(self, name: str, parameters: LDMParameters, gain: Tensor) -> tuple[Tensor, bool]:
        tensors = [t for t in (*parameters, gain) if t is not None]
        key = [t.data_ptr() for t in tensors]
        try:
            key += [t._version for t in tensors]
        except RuntimeError:
            pass  # an inference tensor has no version counter
        current = key == self._key
        if current and name in self._buffers:
            return self._buffers[name], True
        # Not an inference tensor, which could not be written outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if _capturing(gain):
                return self._make(name, parameters, gain), False
            for other in {name} if current else {name, *self._buffers}:
                packed = self._make(other, parameters, gain)
                buffer = self._buffers.get(other)
                if buffer is None or (buffer.shape, buffer.device) != (packed.shape, packed.device):
                    self._buffers[other] = packed
                else:
                    buffer.copy_(packed)
        self._key = key
        return self._buffers[name], False

    def rows(self, parameters: LDMParameters, gain: Tensor, options: str) -> Tensor:
        """For the forward kernel of :mod:`..fast`."""
        self._options = options
        return self._get("rows", parameters, gain)[0]

    def fragments(self, spec: Spec, parameters: LDMParameters, gain: Tensor) -> tuple[Tensor, bool]:
        """
        For the decode kernel: all that a boundary may launch have one layout.

        :returns: The packed parameters, and whether they were there before. A kernel that reads them before it waits for the one
            ahead of it in the stream must not follow those that pack.
        """
        self._spec = spec
        return self._get("fragments", parameters, gain)


def _capturing(t: Tensor) -> bool:
    """Whether a CUDA graph under capture owns new memory: it has no values yet, and other ones at every replay."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


_PACKED: dict[int, tuple[weakref.ref, Packed]] = {}
"""By the identity of the query's bias, which every boundary has. Not a WeakTensorKeyDictionary: a look-up there costs 5 us."""


def of(parameters: LDMParameters) -> Packed:
    """The packed parameters of a boundary."""
    b_query = parameters.b_query
    key = id(b_query)
    known = _PACKED.get(key)
    if known is not None and known[0]() is b_query:
        return known[1]

    def drop(dead: weakref.ref) -> None:
        # Another tensor may have the identity by now.
        if key in _PACKED and _PACKED[key][0] is dead:
            del _PACKED[key]

    packed = Packed()
    _PACKED[key] = (weakref.ref(b_query, drop), packed)
    return packed


def forget() -> None:
    """
    Pack all boundaries' parameters anew at their next call. All, since under FSDP2 a module's parameter is a shard, and what a call
    gets another tensor, whose memory is filled anew for each pass with its version kept.
    """
    for _, packed in list(_PACKED.values()):
        packed.invalidate()
