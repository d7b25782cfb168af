#!/usr/bin/env bash
# Runs one variant of the ablation series: the default LDM with one option changed, or a baseline.
#
# Hardware and time: SCALE=400m trains 15B tokens (14,305 steps) and wants 8 GPUs; SCALE=90m trains 26M tokens (400 steps), about a
# minute on one H200; SCALE=tiny is for a CPU: 110 steps in minutes, which rank nothing. A run that was stopped goes on.
#
# Usage:
#   launch.sh VARIANT GPU [CONFIG_OVERRIDE ...]           # GPU: b200, h100, h200 (or cpu)
#   launch.sh delta_rule b200                             # 400m, 15B tokens, learning rate 1e-3
#   SCALE=90m SEED=1 LR=0.002 launch.sh softmax_key h200  # one GPU
#   SCALE=tiny launch.sh softmax_key cpu                  # to see that it works
#   DRY_RUN=1 launch.sh ldm b200                          # print the command and the complete config
#
# Environment: SCALE (400m, 90m or tiny; 400m), LR (0.001 at 400m, 0.002 at 90m, 0.004 at tiny), SEED (42), STEPS (14305 at 400m,
# 400 at 90m, 110 at tiny), DATA_DIR, CHECKPOINT_DIR (./checkpoints/ablations); the rest as in ../pretrain/launch.sh.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0
fi
[[ $# -ge 2 ]] || fail "need VARIANT GPU, for example: launch.sh delta_rule b200 (launch.sh --help explains)"
VARIANT=$1 GPU=$2; shift 2
if [[ ! -f $HERE/configs/$VARIANT.yaml ]]; then
  known='import sys; from config_utils.methods import ALL_METHODS; sys.exit(sys.argv[1] not in ALL_METHODS)'
  if PYTHONPATH="$HERE/../.." "${PYTHON:-python}" -P -c "$known" "$VARIANT" 2>/dev/null; then
    fail "'$VARIANT' has no config here yet: run paper-experiments/ablations/generate.py, which writes it"
  fi
  fail "unknown variant '$VARIANT': choose one of $(cd "$HERE/configs" && printf '%s ' *.yaml | sed 's/\.yaml//g')"
fi

export SCALE=${SCALE:-400m}
case $SCALE in
  400m) export STEPS=${STEPS:-14305}; LR=${LR:-0.001} ;;
  90m)  export STEPS=${STEPS:-400};   LR=${LR:-0.002} ;;
  tiny) export STEPS=${STEPS:-110};   LR=${LR:-0.004} ;;
  *) fail "unknown SCALE '$SCALE': choose 400m, 90m or tiny" ;;
esac
export CHECKPOINT_DIR=${CHECKPOINT_DIR:-checkpoints/ablations}
exec bash "$HERE/../pretrain/launch.sh" --gpu "$GPU" "$SCALE" "$VARIANT" "$LR" "$@"
