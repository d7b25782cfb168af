#!/usr/bin/env bash
# The whole path on one machine: text -> tokens -> training of PreLN and LDM -> evaluation -> one table and one picture.
# It shows that everything works; at this size it ranks nothing.
#
# Hardware and time: two CPU cores, about 6 minutes after the set-up; a GPU, if there is one, trains ten times as long.
#
# Usage, from anywhere in the repository:
#   bash paper-experiments/quickstart/quickstart.sh                      # a corpus from documentation on this machine
#   bash paper-experiments/quickstart/quickstart.sh --corpus DIR         # your own DIR/train/*.parquet, DIR/eval/*.parquet
#   METHODS="preln attnres_block mhc ldm" bash paper-experiments/quickstart/quickstart.sh
#   DRY_RUN=1 bash paper-experiments/quickstart/quickstart.sh            # print the commands
#
# Environment: METHODS ("preln ldm"), STEPS (110 on a CPU, 1100 on a GPU), LR (0.004), LIMIT (documents a task; 20),
# HELDOUT_TOKENS (read of the held-out text; 100000), OUT (results/quickstart), SKIP_SETUP=1 (use the active environment instead of `uv sync`).
# Safe to run again: finished tokens and checkpoints are used, and a stopped training run goes on.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CORPUS=
while [[ $# -gt 0 ]]; do
  case $1 in
    --corpus) [[ $# -ge 2 ]] || fail "--corpus needs a folder"; CORPUS=$2; shift 2 ;;
    --corpus=*) CORPUS=${1#--corpus=}; shift ;;
    -h|--help) sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "unknown argument '$1' (quickstart.sh --help explains)" ;;
  esac
done
if [[ -n $CORPUS ]]; then
  [[ -d $CORPUS ]] || fail "--corpus $CORPUS is not a folder; it must hold train/*.parquet and eval/*.parquet"
  CORPUS=$(cd "$CORPUS" && pwd)
fi
cd "$ROOT"

DRY_RUN=${DRY_RUN:-0}
METHODS=${METHODS:-preln ldm}
LR=${LR:-0.004}
LIMIT=${LIMIT:-20}
HELDOUT_TOKENS=${HELDOUT_TOKENS:-100000}
OUT=${OUT:-results/quickstart}
GPU=cpu STEPS=${STEPS:-}
if nvidia-smi -L >/dev/null 2>&1; then
  case $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1) in
    *B200*) GPU=b200 ;; *H200*) GPU=h200 ;; *) GPU=h100 ;;
  esac
fi
[[ -n $STEPS ]] || { if [[ $GPU == cpu ]]; then STEPS=110; else STEPS=1100; fi; }
export STEPS NPROC=${NPROC:-1} # one GPU: a tiny batch has four sequences

run() {
  printf '+'; printf ' %q' "$@"; printf '\n'
  [[ $DRY_RUN == 1 ]] || "$@"
}

if [[ ${SKIP_SETUP:-0} != 1 ]]; then
  command -v uv >/dev/null || fail "uv is not here: install it (pip install uv), or activate an environment and set SKIP_SETUP=1"
  run uv sync --quiet
  export PATH="$ROOT/.venv/bin:$PATH"
fi

OWN=$CORPUS
CORPUS=${CORPUS:-$OUT/corpus}
export DATA_DIR=$OUT/tokenized CHECKPOINT_DIR=$OUT/checkpoints WANDB_MODE=${WANDB_MODE:-disabled}
started=$SECONDS

if [[ -z $OWN ]] && ! compgen -G "$CORPUS/eval/*.parquet" >/dev/null; then
  run python data_utils/build_corpus.py "$CORPUS"
fi
EVAL_PARQUET=$(compgen -G "$CORPUS/eval/*.parquet" | head -n 1 || true)
if [[ -z $EVAL_PARQUET ]]; then
  [[ $DRY_RUN == 1 ]] || fail "$CORPUS/eval holds no parquet file; one held-out file must stand there"
  EVAL_PARQUET=$CORPUS/eval/000_00000.parquet
fi
run python data_utils/tokenize_from_pretrain_datasets.py \
  --train-parquet-glob "$CORPUS/train/*.parquet" --eval-parquet-path "$EVAL_PARQUET" \
  --output-dir "$DATA_DIR" --text-field text \
  --tokenizer-name-or-path pretrain/OLMo-core/src/olmo_core/data/tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json \
  --vocab-size 50280 --eos-token-id 50279 --pad-token-id 1 --batch-size 4096 --skip-existing

RESULTS=()
for METHOD in $METHODS; do
  RUN_DIR=$(python -c "from config_utils.experiment import run_name; print(run_name('tiny', '$METHOD', $LR, ${SEED:-42}))" 2>/dev/null) \
    || { [[ $DRY_RUN == 1 ]] && RUN_DIR=tiny-$METHOD-lr$LR-seed${SEED:-42}; } \
    || fail "no Python environment here: leave SKIP_SETUP unset, or activate one"
  CHECKPOINT=$CHECKPOINT_DIR/$RUN_DIR/step$STEPS
  if [[ ! -f $CHECKPOINT/.metadata.json ]]; then
    run bash paper-experiments/pretrain/launch.sh --gpu "$GPU" tiny "$METHOD" "$LR"
  fi
  RESULT=$OUT/eval-$METHOD.json
  run bash paper-experiments/pretrain/evaluation/run.sh "$CHECKPOINT" "$RESULT" \
    --offline --tasks hellaswag,piqa,arc_easy --limit "$LIMIT" --heldout-tokens "$HELDOUT_TOKENS"
  RESULTS+=("$RESULT")
done
run python paper-experiments/quickstart/summarize.py "$OUT" --seconds "$((SECONDS - started))" "${RESULTS[@]}"
