"""
Compiled kernels on disk: compiled once for each :class:`~.layout.Spec` and architecture, by the CuTe DSL where it is
installed, and read from then on without it.

A folder ``<fingerprint>-<architecture>`` below each of the cache's places has for each kernel its machine code
``<name>.cubin`` and, written last, ``<name>.json`` with the kernel's entry and the code's SHA-256. The fingerprint is that of
the kernels' sources and of the DSL's version.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from . import layout

DSL_VERSION = "4.8.1"
"""The version of ``nvidia-cutlass-dsl`` that the kernels are written for."""
PLACES = "DEPTH_MEMORY_KERNELS"
"""The environment variable with the cache's places, separated as in ``PATH``; kernels are written to the first."""
ARCHITECTURES = {9: "sm_90a", 10: "sm_100f"}
"""By the major compute capability. ``f`` is Blackwell's family: B200 and B300."""
SOURCES = ("kernels.py", "layout.py", "pieces.py", "ptx.py")
"""What the kernels of this folder are made of."""

_COMPILING = threading.Lock()


class Spec(Protocol):
    """
    One kernel: of this backend (:class:`.layout.Spec`) or of another one. That names its sources, relative to its own folder, as
    ``sources`` and makes the DSL's object by ``kernel()``.
    """

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> str: ...


@dataclass(frozen=True)
class Code:
    entry: str
    cubin: bytes


def dsl_version() -> str | None:
    """The installed version of the CuTe DSL; ``None`` if there is none."""
    if find_spec("cutlass") is None:
        return None
    try:
        return version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        return None


@cache
def fingerprint(folder: Path = Path(__file__).parent, sources: tuple[str, ...] = SOURCES) -> str:
    digest = hashlib.sha256((dsl_version() or DSL_VERSION).encode())
    for name in sources:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:16]


def places() -> list[Path]:
    given = os.environ.get(PLACES)
    if given:
        return [Path(p) for p in given.split(os.pathsep) if p]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [Path(home) / "depth-memory" / "kernels"]


def _folder(place: Path, spec: Spec, architecture: str) -> Path:
    sources = getattr(spec, "sources", None)
    if sources is None:
        return place / f"{fingerprint()}-{architecture}"
    module = sys.modules[type(spec).__module__]
    assert module.__file__ is not None
    return place / f"{fingerprint(Path(module.__file__).parent, sources)}-{architecture}"


def find(spec: Spec, architecture: str) -> Code | None:
    """The kernel from disk; ``None`` if no place has it whole."""
    for place in places():
        folder = _folder(place, spec, architecture)
        try:
            record = json.loads((folder / f"{spec.name}.json").read_text())
            cubin = (folder / f"{spec.name}.cubin").read_bytes()
        except (OSError, ValueError):
            continue
        if hashlib.sha256(cubin).hexdigest() == record.get("sha256"):
            return Code(record["entry"], cubin)
    return None


def has_at(spec: Spec, architecture: str, place: Path) -> bool:
    return (_folder(place, spec, architecture) / f"{spec.name}.json").is_file()


def has(spec: Spec, architecture: str) -> bool:
    return any(has_at(spec, architecture, place) for place in places())


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
        f.write(data)
    os.replace(f.name, path)


def store(spec: Spec, architecture: str, code: Code, place: Path) -> None:
    folder = _folder(place, spec, architecture)
    _write(folder / f"{spec.name}.cubin", code.cubin)
    record = {
        "entry": code.entry,
        "sha256": hashlib.sha256(code.cubin).hexdigest(),
        "dsl": dsl_version(),
    }
    _write(folder / f"{spec.name}.json", json.dumps(record).encode())


def build(spec: Spec, architecture: str) -> tuple[Code, str]:
    """
    Compile one kernel; no GPU is needed.

    :returns: The machine code and its PTX.
    """
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    from . import kernels

    types = {"p": lambda: Int64(0), "i": lambda: Int32(1), "f": lambda: Float32(0)}
    arguments: list[Any] = [types[t]() for t in spec.arguments]
    kernel: Any
    if isinstance(spec, layout.Spec):
        kernel = {
            "forward": kernels.Forward,
            "backward": kernels.Backward,
            "finish": kernels.Finish,
        }[spec.direction](spec)
        first, n = spec.window_arguments
        if n:
            arguments[first : first + n] = [tuple(arguments[first : first + n])]
    else:
        kernel = spec.kernel()  # type: ignore[attr-defined]
    # The compiler is not safe for threads.
    with _COMPILING, tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {architecture} --keep-ptx --keep-cubin --dump-dir={folder}"
        compiled = cute.compile(kernel, *arguments, Int32(1), make_fake_stream(), options=options)
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
    entry = re.search(r"\.entry\s+(\w+)", ptx)
    assert entry is not None and isinstance(cubin, bytes)
    return Code(entry.group(1), cubin), ptx


def get(spec: Spec, architecture: str) -> Code:
    """
    The kernel from disk, or compiled and kept there.

    :raises RuntimeError: If it is not on disk and the CuTe DSL is not installed.
    """
    found = find(spec, architecture)
    if found is not None:
        return found
    if dsl_version() is None:
        package = type(spec).__module__.rpartition(".")[0]
        raise RuntimeError(
            f"there is no compiled kernel {spec.name} for {architecture}, and nvidia-cutlass-dsl is not installed: install "
            f"the extra 'cute', or compile on another machine with python -m {package}.precompile and set {PLACES}"
        )
    code, _ = build(spec, architecture)
    try:
        store(spec, architecture, code, places()[0])
    except OSError:
        pass  # a read-only place: the next process compiles again
    return code
