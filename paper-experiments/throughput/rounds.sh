#!/usr/bin/env bash
# Speed and memory of the methods side by side: every method once a round, in an order that rotates, each measurement in a
# process of its own, with a fixed matmul and a copy before and after each round. README.md beside this defines the numbers.
#
# Hardware: train uses all GPUs (torchrun above one), prefill and decode one. Most of the time goes into compiling, which
# later rounds find in torch's and Triton's caches on disk.
#
# Usage:
#   rounds.sh train|prefill|decode SCALE GPU ROUNDS [CONFIG_OVERRIDE ...]
#   rounds.sh train 400m h200 3
#   METHODS="preln ldm ldm:reference attnres_full:fla" rounds.sh train 1p7b b200 3    # METHOD:BACKEND names a backend
#   METHODS="preln ldm ldm+model.block.depth.window=2" rounds.sh prefill 1p7b h200 3    # METHOD+OVERRIDE is a row of its own
#   BATCHES="1 64" CONTEXT="2048 16384" rounds.sh decode 1p7b h200 3
#   STEPS=2 TOKENS=256 rounds.sh train tiny cpu 1                                     # only to see that it works
#   DRY_RUN=1 rounds.sh train 400m h200 3                                             # print the commands
#
# SCALE:  tiny, 90m, 400m, 1p5b, 1p7b          GPU: h100, h200, b200, cpu
# Environment: METHODS ("preln attnres_block attnres_full mhc ldm ldm_k4"), OUT (results/throughput/<what and when>),
# NPROC (train: GPUs to use; all), TIMEOUT (seconds for one measurement; 900), COMPILE=0 (train without torch.compile),
# STEPS (timed steps: train and prefill 10, decode 64), WARMUP (untimed ones before; 3), SEED (42), PYTHON (python);
# train: SEQ (tokens in a sequence; the recipe's), TOKENS (in one forward pass on one GPU; the scale's), BATCH (forward
# passes in a step; 1), PROFILE (steps more under torch.profiler: the time of each kernel, in the JSON; 0); prefill: BATCH (prompts; 8), CONTEXT (tokens in each; 2048), CHUNK (tokens of each in one forward
# pass; 4096); decode: BATCHES (rows; "1 8 64"), CONTEXT (tokens in the cache, one or more; 2048).
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python}
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0
fi
[[ $# -ge 4 ]] || fail "need MODE SCALE GPU ROUNDS, for example: rounds.sh train 400m h200 3 (rounds.sh --help explains)"
case $1 in train|prefill|decode) ;; *) fail "unknown mode '$1': choose one of train, prefill, decode" ;; esac
case $3 in h100|h200|b200|cpu) ;; *) fail "unknown GPU '$3': choose one of h100, h200, b200, cpu" ;; esac
[[ $4 =~ ^[1-9][0-9]*$ ]] || fail "ROUNDS must be a positive whole number, got '$4'"
command -v "$PYTHON" >/dev/null || fail "no '$PYTHON' here: activate the environment (source .venv/bin/activate) or set PYTHON"

OPTIONS=()
for NAME in METHODS OUT NPROC TIMEOUT SEQ TOKENS BATCH BATCHES CONTEXT CHUNK STEPS WARMUP PROFILE SEED; do
  if [[ -n ${!NAME:-} ]]; then OPTIONS+=("--${NAME,,}" "${!NAME}"); fi
done
[[ ${COMPILE:-1} != 0 ]] || OPTIONS+=(--no-compile)
[[ ${DRY_RUN:-0} != 1 ]] || OPTIONS+=(--dry-run)
# As in ../pretrain/launch.sh, which says why.
[[ $3 != cpu ]] || export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
exec "$PYTHON" "$HERE/rounds.py" "$@" "${OPTIONS[@]}"
