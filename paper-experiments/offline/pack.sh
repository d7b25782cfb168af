#!/usr/bin/env bash
# Packs what a GPU machine without a network needs to run this repository beside its own PyTorch: the other packages, and the
# CuTe DSL kernels compiled beforehand. Runs on any Linux machine with uv and a package index; no GPU.
#
# Time and size: 3 minutes on 2 cores; 270 MB of packages (PACKAGES chooses fewer), 1 MB of kernels.
#
# Usage:
#   pack.sh OUT_DIR                      # packages.tar.xz, kernels.tar.gz and env.sh
#   ARCH=sm_100f pack.sh OUT_DIR         # kernels for a B200 instead of an H100 or H200
#   DRY_RUN=1 pack.sh OUT_DIR            # print the packages and the commands
# There, in a copy of the repository:
#   source OUT_DIR/env.sh && bash paper-experiments/throughput/rounds.sh train 400m h200 3
#
# Environment: PYTHON_VERSION (3.12, that of the other machine), WITHOUT (packages that are there already, as patterns; the
# default is PyTorch with its CUDA libraries and Triton), PACKAGES (patterns; only these), ARCH (sm_90a), SHAPES
# (512x8,1024x8,1024x4,2048x8,2048x4: widths and slots of LDM), WIDTHS (1024,2048: of mHC), KERNELS=0 (no kernels).
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0
fi
[[ $# -eq 1 ]] || fail "need one folder for the result: pack.sh OUT_DIR (pack.sh --help explains)"
command -v uv >/dev/null || fail "uv is not installed; the README says how"
PYTHON_VERSION=${PYTHON_VERSION:-3.12} ARCH=${ARCH:-sm_90a} KERNELS=${KERNELS:-1} DRY_RUN=${DRY_RUN:-0}
SHAPES=${SHAPES:-512x8,1024x8,1024x4,2048x8,2048x4} WIDTHS=${WIDTHS:-1024,2048}
read -ra WANTED <<<"${PACKAGES:-*}"
read -ra UNWANTED <<<"${WITHOUT:-torch triton nvidia-* cuda-*}"
[[ $PYTHON_VERSION =~ ^3\.[0-9]+$ ]] || fail "PYTHON_VERSION is a version such as 3.12, got '$PYTHON_VERSION'"

cd "$REPOSITORY"
mkdir -p "$1" || fail "cannot make the folder $1"
OUT=$(cd "$1" && pwd)
WORK=$(mktemp -d); trap 'rm -rf "$WORK"' EXIT
TARGET=(--python-version "$PYTHON_VERSION" --python-platform x86_64-manylinux_2_28)

matches() {  # NAME PATTERN...
  local name=$1 pattern; shift
  for pattern; do
    # shellcheck disable=SC2053 # a pattern
    if [[ $name == $pattern ]]; then return 0; fi
  done
  return 1
}

uv pip compile --quiet --no-header --no-annotate "${TARGET[@]}" pyproject.toml >"$WORK/all.txt"
while read -r line; do
  name=${line%%==*}
  if [[ $line == *==* ]] && matches "$name" "${WANTED[@]}" && ! matches "$name" "${UNWANTED[@]}"; then
    echo "$line"
  fi
done <"$WORK/all.txt" >"$WORK/list.txt"
[[ -s $WORK/list.txt ]] || fail "no package matches PACKAGES='${PACKAGES:-*}' without those of WITHOUT"

PRECOMPILE=()
if [[ $KERNELS == 1 ]]; then
  for backend in ldm.backends.fast ldm.backends.fast_inference; do
    PRECOMPILE+=("olmo_core.nn.$backend.precompile --shapes $SHAPES")
  done
  PRECOMPILE+=("olmo_core.nn.hyper_connections.backends.fast.precompile --widths $WIDTHS")
fi
run() { if [[ $DRY_RUN == 1 ]]; then echo "$*"; else "$@"; fi; }

if [[ $DRY_RUN == 1 ]]; then cat "$WORK/list.txt"; fi
run uv pip install --quiet --no-deps "${TARGET[@]}" --target "$WORK/packages" -r "$WORK/list.txt"
for command in ${PRECOMPILE[@]+"${PRECOMPILE[@]}"}; do
  # shellcheck disable=SC2086 # words
  run uv run --quiet --isolated --no-dev --extra cute python -m $command --arch "$ARCH" --out "$WORK/kernels"
done
if [[ $DRY_RUN == 1 ]]; then exit 0; fi

# Into place only when whole.
find "$WORK/packages" -name __pycache__ -prune -exec rm -rf {} +
tar -C "$WORK" -cf - packages | xz -T0 -1 >"$OUT/packages.tar.xz.part"
mv "$OUT/packages.tar.xz.part" "$OUT/packages.tar.xz"
if [[ $KERNELS == 1 ]]; then
  tar -C "$WORK" -czf "$OUT/kernels.tar.gz.part" kernels
  mv "$OUT/kernels.tar.gz.part" "$OUT/kernels.tar.gz"
fi
cat >"$OUT/env.sh.part" <<'END'
# Source it in the repository: unpacks what lies beside it into UNPACKED, once, lays the repository's own packages into
# OLMo-core as links, and names all of it for Python.
_packed=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
_unpacked=${UNPACKED:-${TMPDIR:-/tmp}/depth-memory-packages-$UID}
if [ ! -e "$_unpacked/complete" ]; then
  mkdir -p "$_unpacked"
  for _file in "$_packed"/*.tar.*; do tar -C "$_unpacked" -xf "$_file" || return 1; done
  touch "$_unpacked/complete"
fi
for _file in "$PWD"/pretrain/OLMo-core/src/olmo_core/nn/*/; do
  ln -sfn "${_file%/}" "$_unpacked/packages/olmo_core/nn/$(basename "$_file")" || return 1
done
export PYTHONPATH="$PWD:$_unpacked/packages${PYTHONPATH:+:$PYTHONPATH}" PYTHON="${PYTHON:-python3}"
if [ -d "$_unpacked/kernels" ]; then export DEPTH_MEMORY_KERNELS="$_unpacked/kernels"; fi
END
mv "$OUT/env.sh.part" "$OUT/env.sh"
ls -l "$OUT"
