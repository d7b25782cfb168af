#!/usr/bin/env bash
# Makes the tables of README.md and of the backends' documents again, one after the other. A table that fails is named at the end
# and does not stop the others.
#
# Hardware: one H100, H200 or B200 with nothing else on it (a round that was disturbed is named by its canary, a kernel's time is not).
# Time: 1 to 2 hours for all of them on an H200, by the sum of single runs; much of it compiles kernels, which a later run finds on disk.
#
# Usage:
#   tables.sh GPU [TABLE ...] [-- CONFIG_OVERRIDE ...]
#   tables.sh h200                                # all tables
#   tables.sh h200 mhc_fast prefill prefill_16k   # some
#   ROUNDS=1 METHODS="preln ldm+model.block.depth.window=2" tables.sh h200 prefill
#   DRY_RUN=1 tables.sh h200                      # print the commands
#
# TABLE, kernels:        ldm_flexible ldm_fast ldm_fast_inference attnres attnres_fla mhc mhc_fast boundary overlap sanitizer
# TABLE, whole models:   train_400m train_1p7b profile_400m prefill prefill_16k decode decode_16k
# Environment: OUT (results/tables), ROUNDS (3), METHODS (all; also METHOD:BACKEND and METHOD+OVERRIDE), PYTHON (python), and what rounds.sh takes.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0
fi
[[ $# -ge 1 ]] || fail "need a GPU, for example: tables.sh h200 (tables.sh --help explains)"
GPU=$1; shift
case $GPU in h100|h200|b200) ;; *) fail "unknown GPU '$GPU': choose one of h100, h200, b200" ;; esac
KERNELS=(ldm_flexible ldm_fast ldm_fast_inference attnres attnres_fla mhc mhc_fast boundary overlap sanitizer)
MODELS=(train_400m train_1p7b profile_400m prefill prefill_16k decode decode_16k)
TABLES=()
while [[ $# -gt 0 && $1 != -- ]]; do TABLES+=("$1"); shift; done
if [[ ${1:-} == -- ]]; then shift; fi
OVERRIDES=("$@")
if [[ ${#TABLES[@]} -eq 0 ]]; then TABLES=("${KERNELS[@]}" "${MODELS[@]}"); fi

PYTHON=${PYTHON:-python} ROUNDS=${ROUNDS:-3} DRY_RUN=${DRY_RUN:-0}
OUT=${OUT:-results/tables}
export PYTHON
METHODS=${METHODS:-preln attnres_block attnres_full mhc ldm ldm_k4}
for table in "${TABLES[@]}"; do
  case " ${KERNELS[*]} ${MODELS[*]} " in *" $table "*) ;; *) fail "unknown table '$table': choose some of ${KERNELS[*]} ${MODELS[*]}" ;; esac
done
command -v "$PYTHON" >/dev/null || fail "there is no '$PYTHON' here; activate the environment or set PYTHON"
[[ $DRY_RUN == 1 ]] || mkdir -p "$OUT"

run() { printf "+%s\n" "$(printf " %q" "$@")"; [[ $DRY_RUN == 1 ]] || "$@"; }
tune() { run "$PYTHON" -m "olmo_core.nn.$1.tune" "${@:3}" --out "$OUT/$2.json"; }
rounds() {  # TABLE MODE SCALE, settings before the command
  run env METHODS="$METHODS" OUT="$OUT/$1" "${@:4}" bash "$HERE/rounds.sh" "$2" "$3" "$GPU" "$ROUNDS" ${OVERRIDES[@]+"${OVERRIDES[@]}"}
}

make_table() {
  case $1 in
    ldm_flexible) tune ldm.backends.flexible "$1" --quick --compile ;;
    ldm_fast) tune ldm.backends.fast "$1" --only sizes --tokens 16384,65536 ;;
    ldm_fast_inference) tune ldm.backends.fast_inference "$1" ;;
    attnres) tune attnres.backends.flexible "$1" --quick ;;
    attnres_fla) tune attnres.backends.flexible "$1" --parts fla --shapes 1024x9,1024x25,2048x9,2048x25 ;;
    mhc) tune hyper_connections.backends.flexible "$1" --quick ;;
    mhc_fast) tune hyper_connections.backends.fast "$1" ;;
    boundary) run "$PYTHON" "$HERE/boundary.py" --out "$OUT/$1.json" ;;
    overlap) run "$PYTHON" "$HERE/overlap.py" --out "$OUT/$1.json" ;;
    sanitizer) run "$PYTHON" "$HERE/../../tests/sanitize.py" --tools racecheck memcheck --jobs 4 --out "$OUT/$1.json" ;;
    train_400m) rounds "$1" train 400m ;;
    train_1p7b) rounds "$1" train 1p7b ;;
    profile_400m) ROUNDS=1 rounds "$1" train 400m PROFILE=2 ;;
    prefill) rounds "$1" prefill 1p7b ;;
    prefill_16k) rounds "$1" prefill 1p7b BATCH=1 CONTEXT=16384 ;;
    decode) rounds "$1" decode 1p7b ;;
    decode_16k) rounds "$1" decode 1p7b CONTEXT=16384 ;;
  esac
}

FAILED=()
for table in "${TABLES[@]}"; do
  echo "== $table"
  make_table "$table" || FAILED+=("$table")
done
if [[ ${#FAILED[@]} -gt 0 ]]; then
  echo "error: not made: ${FAILED[*]}; see above" >&2; exit 1
fi
