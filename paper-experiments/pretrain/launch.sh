#!/usr/bin/env bash
# Trains one model of the paper, or goes on with it: a run that was stopped continues from its last checkpoint.
#
# Hardware and time: tiny runs on a CPU (minutes); 90m on one GPU (under an hour on an H200); 400m and 1p5b are sized for
# 8 Hopper or Blackwell GPUs (days). One process on one GPU or a CPU, torchrun on several GPUs.
#
# Usage:
#   launch.sh [--gpu h100|h200|b200|cpu] SCALE METHOD LR [CONFIG_OVERRIDE ...]
#   launch.sh 400m ldm 0.001                      # on the GPUs that are here
#   launch.sh --gpu h100 1p5b preln 0.001         # name the GPU
#   STEPS=100 launch.sh --gpu cpu tiny ldm 0.004  # a short run
#   DRY_RUN=1 launch.sh 400m mhc 0.002            # print the command and the complete config
#
# SCALE:  tiny, 90m, 400m, 1p5b, 1p7b          METHOD: preln, attnres_full, attnres_block, mhc, ldm, ldm_k4
# Environment: DATA_DIR (the tokeniser's output; required), CHECKPOINT_DIR (./checkpoints), SEED (42), STEPS (the
# recipe's), WANDB_ENTITY, WANDB_PROJECT (depth-memory), NPROC (GPUs to use; all), NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python}
DRY_RUN=${DRY_RUN:-0}
GPU=
if [[ ${1:-} == --gpu ]]; then
  [[ $# -ge 2 ]] || fail "--gpu needs a value: h100, h200, b200 or cpu"
  GPU=$2; shift 2
elif [[ ${1:-} == --gpu=* ]]; then
  GPU=${1#--gpu=}; shift
fi
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0
fi
[[ $# -ge 3 ]] || fail "need SCALE METHOD LR, for example: launch.sh 400m ldm 0.001 (launch.sh --help explains)"
SCALE=$1 METHOD=$2 LR=$3; shift 3

case $GPU in ''|h100|h200|b200|cpu) ;; *) fail "unknown GPU '$GPU': choose one of h100, h200, b200, cpu" ;; esac

gpu_names() { nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true; }
NAMES=$(gpu_names)
if [[ -z $GPU ]]; then
  case $NAMES in
    *H100*) GPU=h100 ;;
    *H200*) GPU=h200 ;;
    *B200*) GPU=b200 ;;
    '') if [[ $DRY_RUN == 1 ]]; then GPU=b200
        elif [[ $SCALE == tiny ]]; then GPU=cpu
        else fail "no GPU is here, and $SCALE is too large for a CPU: run the tiny scale, or pass --gpu cpu to insist"; fi ;;
    *) fail "this GPU ($(head -n 1 <<<"$NAMES")) has no settings of its own: pass --gpu with the one nearest to it (h100, h200 or b200)" ;;
  esac
fi
if [[ $DRY_RUN != 1 ]]; then
  [[ -n ${DATA_DIR:-} ]] || fail "DATA_DIR is not set: set it to the --output-dir of data_utils/tokenize_from_pretrain_datasets.py"
  [[ -d $DATA_DIR ]] || fail "DATA_DIR=$DATA_DIR is not a folder: set it to the --output-dir of data_utils/tokenize_from_pretrain_datasets.py"
fi

if [[ $GPU == cpu ]]; then
  # glibc gives each step's logits (hundreds of MB) back to the system and gets them again page by page: a third of the CPU
  # time of a tiny run (24 steps and an evaluation: 114 s of CPU time without these, 77 s with them).
  export MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-17179869184}
  export MALLOC_TOP_PAD_=${MALLOC_TOP_PAD_:-268435456}
  # Threads spin while they wait, in vain where other work has their core: a step of tiny LDM took 12 s on two busy cores, 1.6 s with this.
  export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
  NPROC=${NPROC:-1}
  # OLMo-core would say 8, whatever the machine.
  if [[ $NPROC =~ ^[1-9][0-9]*$ ]]; then export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + NPROC - 1) / NPROC))}; fi
else
  COUNT=$(grep -c . <<<"$NAMES" || true)
  NPROC=${NPROC:-$((COUNT > 0 ? COUNT : 1))} # without a GPU train.py says so
fi
NNODES=${NNODES:-1}
[[ $NPROC =~ ^[1-9][0-9]*$ ]] || fail "NPROC must be a number of processes, got '$NPROC'"
[[ $NNODES =~ ^[1-9][0-9]*$ ]] || fail "NNODES must be a number of machines, got '$NNODES'"
command -v "$PYTHON" >/dev/null || fail "no '$PYTHON' here: activate the environment (source .venv/bin/activate) or set PYTHON"
if [[ $NPROC -gt 1 || $NNODES -gt 1 ]]; then
  RUN=("$PYTHON" -m torch.distributed.run --nproc-per-node "$NPROC")
  if [[ $NNODES -gt 1 ]]; then
    [[ ${NODE_RANK:-} =~ ^[0-9]+$ ]] || fail "NNODES=$NNODES: set NODE_RANK to this machine's number, 0 to $((NNODES - 1))"
    [[ -n ${MASTER_ADDR:-} ]] || fail "NNODES=$NNODES: set MASTER_ADDR to the first machine's name or address"
    RUN+=(--nnodes "$NNODES" --node-rank "$NODE_RANK"
          --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
  else
    RUN+=(--standalone)
  fi
else
  RUN=("$PYTHON")
fi
RUN+=("$HERE/train.py" "$SCALE" "$METHOD" "$LR" --gpu "$GPU" "$@")

if [[ $DRY_RUN == 1 ]]; then
  printf '# %q' "${RUN[0]}"; printf ' %q' "${RUN[@]:1}"; printf '\n'
  exec "$PYTHON" "$HERE/train.py" "$SCALE" "$METHOD" "$LR" --gpu "$GPU" "$@" --dry-run
fi
exec "${RUN[@]}"
