#!/usr/bin/env bash
# The whole path on one machine: text -> tokens -> training of PreLN and LDM -> evaluation -> one table and one picture.
# It shows that everything works; at this size it ranks nothing.
#
# Hardware and time: two CPU cores, 3 minutes after the set-up where they are idle; a GPU, if there is one, trains ten times as long.
#
# Usage, from anywhere in the repository:
#   bash paper-experiments/quickstart/quickstart.sh                      # a corpus from documentation on this machine
#   bash paper-experiments/quickstart/quickstart.sh --corpus DIR         # your own DIR/train/*.parquet, DIR/eval/*.parquet
#   METHODS="preln attnres_block mhc ldm" bash paper-experiments/quickstart/quickstart.sh
#   STEPS=20 LIMIT=2 OUT=results/short bash paper-experiments/quickstart/quickstart.sh   # 2 minutes: every part, no learning
#   DRY_RUN=1 bash paper-experiments/quickstart/quickstart.sh            # print the commands
#
# Environment: METHODS ("preln ldm"), STEPS (110 on a CPU, 1100 on a GPU), LR (0.004), LIMIT (documents a task; 20),
# HELDOUT_TOKENS (read of the held-out text; as many as the training reads, 1024 a step, 100000 at most), OUT (results/quickstart),
# SKIP_SETUP=1 (use the active environment instead of `uv sync`).
# Safe to run again: finished tokens and checkpoints are used, and a stopped training run goes on. Give other STEPS another OUT.
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
OUT=${OUT:-results/quickstart}
GPU=cpu STEPS=${STEPS:-}
if nvidia-smi -L >/dev/null 2>&1; then
  case $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1) in
    *B200*) GPU=b200 ;; *H200*) GPU=h200 ;; *) GPU=h100 ;;
  esac
fi
[[ -n $STEPS ]] || { if [[ $GPU == cpu ]]; then STEPS=110; else STEPS=1100; fi; }
[[ $STEPS =~ ^[1-9][0-9]{0,8}$ ]] || fail "STEPS must be a positive whole number, got '$STEPS'"
HELDOUT_TOKENS=${HELDOUT_TOKENS:-$((STEPS < 98 ? STEPS * 1024 : 100000))} # reading more would take longer than the training
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

NAME_RUN='import sys; from config_utils.run_info import run_name
print(run_name("tiny", sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))'
RESULTS=()
for METHOD in $METHODS; do
  RUN_DIR=$(python -c "$NAME_RUN" "$METHOD" "$LR" "${SEED:-42}" 2>/dev/null) \
    || { [[ $DRY_RUN == 1 ]] && RUN_DIR=tiny-$METHOD-lr$LR-seed${SEED:-42}; } \
    || fail "the run cannot be named: LR must be a number above 0, got '$LR'; SEED a whole number, got '${SEED:-42}'"
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
