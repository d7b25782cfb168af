#!/usr/bin/env bash
# Evaluates a checkpoint: held-out cross-entropy and lm-eval's zero-shot tasks, into one JSON file and a table.
#
# Hardware and time: any machine; one process for each visible GPU, one on a CPU. A 400M model on one H200 takes minutes for
# the usual tasks; a tiny model on a CPU with --limit takes seconds.
#
# Usage:
#   run.sh CHECKPOINT OUT.json [OPTION ...]
#   run.sh "$CHECKPOINT_DIR/<run>/step47684" my-results/ldm.json       # a checkpoint of a training run
#   run.sh ldm-400m/lr1e-3 results.json                                # a downloaded release
#   run.sh CHECKPOINT OUT.json --offline --tasks hellaswag,piqa --limit 100
#   DRY_RUN=1 run.sh CHECKPOINT OUT.json                               # print the command
#
# Options: --data-dir DIR, --no-heldout, --heldout-tokens N, --tasks a,b|none, --offline, --limit N, --num-fewshot N,
# --batch-size N, --max-length N, --device cpu|cuda, --dtype float32|bfloat16; run.sh --help explains them.
# Environment: DATA_DIR (the tokeniser's output; the held-out cross-entropy needs it), NPROC (GPUs to use; all visible),
# PYTHON (python).
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../../.." && pwd)
PYTHON=${PYTHON:-python}
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1 # a folder named eval where the user stands must not be taken for ours
# Progress bars are for terminals; in a log they are pages.
[[ -t 2 ]] || export TQDM_DISABLE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1
command -v "$PYTHON" >/dev/null || fail "no '$PYTHON' here: activate the environment (source .venv/bin/activate) or set PYTHON"

for arg in "$@"; do
  case $arg in -h|--help) exec "$PYTHON" -m eval.run --help ;; esac
done
[[ $# -ge 2 && $1 != -* && $2 != -* ]] || fail "need CHECKPOINT OUT.json, for example: run.sh \"\$CHECKPOINT_DIR/<run>/step47684\" results.json"

on_cpu=0
previous=
for arg in "$@"; do
  [[ $previous == --device && $arg == cpu || $arg == --device=cpu ]] && on_cpu=1
  previous=$arg
done
if [[ -z ${NPROC:-} ]]; then
  NPROC=1
  if [[ $on_cpu == 0 ]] && command -v nvidia-smi >/dev/null; then
    NPROC=$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')
  fi
fi
# On a CPU glibc otherwise returns each batch's logits to the system, and waiting threads spin (../launch.sh has the numbers).
command -v nvidia-smi >/dev/null || export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0} \
  MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-17179869184} MALLOC_TOP_PAD_=${MALLOC_TOP_PAD_:-268435456}
[[ $NPROC =~ ^[1-9][0-9]*$ ]] || fail "NPROC must be a number of processes, got '$NPROC'"

if [[ $NPROC -gt 1 ]]; then
  RUN=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" -m eval.run "$@")
else
  RUN=("$PYTHON" -m eval.run "$@")
fi
if [[ ${DRY_RUN:-0} == 1 ]]; then
  printf '%q ' "${RUN[@]}"; printf '\n'
  exit 0
fi
if [[ $NPROC -gt 1 ]]; then
  # torchrun answers a mistake with a page of traceback; one process answers with one sentence.
  "$PYTHON" -m eval.run "$@" --check
fi
exec "${RUN[@]}"
