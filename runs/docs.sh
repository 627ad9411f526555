#!/bin/bash
# The toy's scores on docs: bash runs/docs.sh [OUT]. Run it again to continue. SEEDS="3 4" trains other seeds than 0 1 2.
# For each seed, an MAE-LM and an MLM are trained, fine-tuned with five seeds, and probed without fine-tuning. Two
# processes run at a time, with one thread each.
set -eo pipefail
export out=${1-out/docs} OMP_NUM_THREADS=1

score() {  # NAME INIT: fine-tuning, and linear probes of the mean vector and of [CLS]
    python finetune.py --init "$2" --task docs --out "$out/$1-tuned"
    for vector in mean cls; do python finetune.py --init "$2" --task docs --frozen $vector --out "$out/$1-$vector"; done
}

model() {  # ABLATION SEED
    python train.py --ablation "$1" --seed "$2" --out "$out/$1-$2"
    score "$1-$2" "$out/$1-$2"
}

export -f score model
mkdir -p "$out"
for seed in ${SEEDS-0 1 2}; do printf 'model mae-lm %s\nmodel mlm %s\n' "$seed" "$seed"; done |
    xargs -P 2 -L 1 bash -eo pipefail -c '"$@" >> "$out/log.txt" 2>&1' -
set -- ${SEEDS-0 1 2}
score random "random:$out/mae-lm-$1" >> "$out/log.txt" 2>&1
