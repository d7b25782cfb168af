"""
The overlay: its packages are found in editable mode and from a wheel, it adds to OLMo-core and replaces nothing, and
importing it needs torch alone.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OVERLAY = ROOT / "pretrain" / "OLMo-core"
SOURCES = OVERLAY / "src"
PACKAGES = sorted({".".join(p.parent.relative_to(SOURCES).parts) for p in SOURCES.rglob("*.py")})
"""Of the source tree."""
LEAVES = {package.split(".")[2] for package in PACKAGES if package.startswith("olmo_core.nn.")}
"""The packages that the overlay adds below ``olmo_core.nn``."""

MODULES = sorted(
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES.rglob("*.py")
    # A kernel package's modules may need its toolchain; they are imported where used.
    if not {"flexible", "fast", "fast_inference"} & set(path.parts)
    and not path.stem.startswith("triton_")  # what the Triton packages share
)
"""Every module of ours that must import on a machine with torch alone."""


def run_python(code: str, *args: str, cwd: Path, options: tuple[str, ...] = ()) -> str:
    """
    Run code in a fresh interpreter with neither the current folder (-P) nor PYTHONPATH on its path; returns the last
    line that it prints.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-s", *options, "-c", code, *args],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


# The same for every way of installing: the names of the README, and where they come from.
IMPORTS = """
import json
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.depth import DepthTransformerConfig
from olmo_core.generate import TransformerGenerationModule
import olmo_core.nn.ldm, olmo_core.nn.transformer
model = DepthTransformerConfig.llama_like(
    d_model=16, vocab_size=32, n_layers=2, n_heads=2
).with_depth(LDMConfig(d_k=2)).build()
print(json.dumps([olmo_core.nn.ldm.__file__, olmo_core.nn.transformer.__file__, model.num_params]))
"""


def test_the_installed_overlay_imports_from_any_folder(tmp_path):
    ours, theirs, parameters = json.loads(run_python(IMPORTS, cwd=tmp_path))
    assert Path(ours) == SOURCES / "olmo_core/nn/ldm/__init__.py"
    assert Path(theirs) == upstream_root() / "olmo_core/nn/transformer/__init__.py"
    assert parameters > 0


def upstream_root() -> Path:
    """The folder that holds upstream's ``olmo_core``."""
    distribution = importlib.metadata.distribution("ai2-olmo-core")
    return Path(str(distribution.locate_file("olmo_core/__init__.py"))).parents[1]


def upstream_files() -> list[str]:
    files = importlib.metadata.files("ai2-olmo-core")
    assert files
    return [
        f.as_posix() for f in files if f.parts[0] == "olmo_core" and "__pycache__" not in f.parts
    ]


def hashes(root: Path) -> dict[str, str]:
    return {
        p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file() and "__pycache__" not in p.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """
    The overlay's wheel. Built by the setuptools of this environment (torch depends on it) through the hook that every
    installer calls, from a copy, so that no build folder is left in the source tree and no index is needed.
    """
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        OVERLAY,
        folder / "source",
        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist"),
    )
    name = run_python(
        "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))",
        str(folder),
        cwd=folder / "source",
    )
    return folder / name


@pytest.fixture(scope="module")
def wheel_files(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as z:
        return {n for n in z.namelist() if ".dist-info/" not in n}


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder with a copy of upstream's ``olmo_core`` and the overlay's wheel installed (a pure wheel: unpacked) over it."""
    folder = tmp_path_factory.mktemp("site")
    for name in upstream_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(upstream_root() / name, folder / name)
    return folder


def test_pyproject_lists_the_packages_of_the_source_tree():
    """One that is missing there is not found, and no launch of any method gets past its import."""
    setuptools = tomllib.loads((OVERLAY / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == PACKAGES, "`packages` in pretrain/OLMo-core"
    folders = {package: f"src/{package.replace('.', '/')}" for package in PACKAGES}
    assert setuptools["package-dir"] == folders, "`package-dir` in pretrain/OLMo-core"
    assert {"depth", "ldm", "attnres", "hyper_connections"} <= LEAVES


def test_the_wheel_holds_every_file_below_src(wheel_files):
    """Nobody may forget to list a new package, or a data file, in pyproject.toml."""
    on_disk = {
        p.relative_to(SOURCES).as_posix()
        for p in SOURCES.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert wheel_files == on_disk
    assert "olmo_core/nn/ldm/backends/BACKENDS.md" in wheel_files
    for folder in {p.parent for p in SOURCES.rglob("*.py")}:
        assert (folder / "__init__.py").exists(), f"{folder} is no package"


def test_the_wheel_adds_leaf_packages_only(wheel_files):
    allowed = tuple(f"olmo_core/nn/{leaf}/" for leaf in LEAVES)
    assert all(name.startswith(allowed) for name in wheel_files)
    upstream = upstream_files()
    assert len(upstream) > 200
    # Neither a file of the same name nor a module beside a package of the same name (nn/ldm.py).
    taken = {name.removesuffix(".py").removesuffix("/__init__") for name in upstream}
    folders = {parent.as_posix() for name in upstream for parent in Path(name).parents}
    for leaf in LEAVES:
        assert f"olmo_core/nn/{leaf}" not in taken | folders, f"upstream has a {leaf} of its own"


def test_a_wheel_installs_beside_upstream_and_leaves_it_whole(wheel, site, tmp_path):
    before = hashes(site)
    assert len(before) > 200
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)

    # -S leaves out the .pth of the editable install. site-packages comes last: everything but olmo_core is there.
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]; sys.path.append(sys.argv[2])\n"
        "assert not [f for f in sys.meta_path if 'Editable' in str(f)]\n" + IMPORTS
    )
    out = run_python(code, str(site), str(upstream_root()), cwd=tmp_path, options=("-S", "-B"))
    ours, theirs, _ = json.loads(out)
    assert Path(ours) == site / "olmo_core/nn/ldm/__init__.py"
    assert Path(theirs) == site / "olmo_core/nn/transformer/__init__.py"

    # Uninstalling removes what RECORD lists.
    record = next(site.glob("depth_memory_olmo_core-*.dist-info/RECORD"))
    for line in record.read_text().splitlines():
        (site / line.split(",")[0]).unlink()
    assert hashes(site) == before


def test_the_overlay_pins_upstream():
    """An overlay works with one release of what it lies over."""
    requires = importlib.metadata.requires("depth-memory-olmo-core") or []
    version = importlib.metadata.version("ai2-olmo-core")
    assert f"ai2-olmo-core=={version}" in requires


OPTIONAL = ("triton", "fla", "lm_eval", "wandb", "cutlass", "tile_kernels", "tilelang", "olmo_eval")


def test_our_modules_import_with_torch_alone(tmp_path):
    """
    With every optional package hidden. Upstream tries some of them (triton, fla) and copes; ours may not even try, and
    nothing may touch CUDA.
    """
    code = """
import importlib, json, sys
modules, optional, sources = json.loads(sys.argv[1])
asked = []
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in optional:
            frame = sys._getframe(1)
            while frame.f_code.co_filename.startswith("<frozen importlib"):
                frame = frame.f_back
            asked.append([name, frame.f_code.co_filename])
            raise ModuleNotFoundError(f"hidden: {name}", name=name)
sys.meta_path.insert(0, Hidden())
for m in modules:
    importlib.import_module(m)
import torch
ours = [a for a in asked if a[1].startswith(sources)]
print(json.dumps([torch.cuda.is_initialized(), ours, len(asked), len(modules)]))
"""
    out = run_python(code, json.dumps([MODULES, OPTIONAL, str(SOURCES)]), cwd=tmp_path)
    initialised, ours, asked, count = json.loads(out)
    assert not initialised
    assert ours == []
    assert asked > 0, "the hook saw nothing, not even upstream's own attempts"
    assert count == len(MODULES) >= 15


def test_commands_run_by_path():
    """``python eval/run.py`` as well as ``python -m eval.run``, also where nothing is installed."""
    commands = [p for p in ROOT.glob("*/*.py") if "if __name__ ==" in p.read_text()]
    commands = [p for p in commands if (p.parent / "__init__.py").is_file()]
    assert {p.parent.name for p in commands} >= {"eval", "data_utils"}
    for path in commands:
        text = path.read_text()
        assert "\nif not __package__:\n" in text, path
        assert not re.search(r"^ *from \.", text, re.M), path
