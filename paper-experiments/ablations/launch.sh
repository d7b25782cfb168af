#!/usr/bin/env bash
# Runs one variant of the ablation series: the default LDM with one option changed, or a baseline.
#
# Hardware and time: SCALE=400m trains 15B tokens (14,305 steps) and wants 8 GPUs; SCALE=90m trains 26M tokens (400 steps), about a
# minute on one H200. A run that was stopped goes on.
#
# Usage:
#   launch.sh VARIANT GPU [CONFIG_OVERRIDE ...]           # GPU: b200, h100, h200 (or cpu)
#   launch.sh delta_rule b200                             # 400m, 15B tokens, learning rate 1e-3
#   SCALE=90m SEED=1 LR=0.002 launch.sh softmax_key h200  # one GPU
#   DRY_RUN=1 launch.sh ldm b200                          # print the command and the complete config
#
# Environment: SCALE (400m), LR (0.001 at 400m, 0.002 at 90m), SEED (42), STEPS (14305 at 400m, 400 at 90m), DATA_DIR,
# CHECKPOINT_DIR (./checkpoints/ablations); the rest as in ../pretrain/launch.sh.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0
fi
[[ $# -ge 2 ]] || fail "need VARIANT GPU, for example: launch.sh delta_rule b200 (launch.sh --help explains)"
VARIANT=$1 GPU=$2; shift 2
[[ -f $HERE/configs/$VARIANT.yaml ]] \
  || fail "unknown variant '$VARIANT': choose one of $(cd "$HERE/configs" && printf '%s ' *.yaml | sed 's/\.yaml//g')"

export SCALE=${SCALE:-400m}
case $SCALE in
  400m) export STEPS=${STEPS:-14305}; LR=${LR:-0.001} ;;
  90m)  export STEPS=${STEPS:-400};   LR=${LR:-0.002} ;;
  *) fail "unknown SCALE '$SCALE': choose 400m or 90m" ;;
esac
export CHECKPOINT_DIR=${CHECKPOINT_DIR:-checkpoints/ablations}
exec bash "$HERE/../pretrain/launch.sh" --gpu "$GPU" "$SCALE" "$VARIANT" "$LR" "$@"
