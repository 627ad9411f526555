#!/bin/bash
# Which encoders compare two texts? bash runs/pairs.sh [OUT]. Run it again to continue. Two processes run at a time, with
# one thread each.
set -eo pipefail
export out=${1-out/pairs} OMP_NUM_THREADS=1
mkdir -p "$out"
python -m bench.pairs "$out/data"

tune() {  # NAME INIT
    python finetune.py --init "$2" --task custom --data "$out/data" --epochs 8 --learning-rate 3e-4 --seeds 2 \
        --out "$out/$1-tuned"
}

toy() {  # NAME SEED FLAGS...
    python train.py --seed "$2" --out "$out/$1-$2" "${@:3}"
    tune "$1-$2" "$out/$1-$2"
}

export -f toy tune
{
    for seed in 0 1 2; do
        for row in mae-lm mlm enc-mask; do echo toy $row $seed --ablation $row; done
    done
    echo toy long 0 --max-steps 5700
    echo toy mlm-long 0 --ablation mlm --max-steps 5700
} | xargs -P 2 -L 1 bash -eo pipefail -c '"$@" >> "$out/log.txt" 2>&1' -
tune random "random:$out/mae-lm-0" >> "$out/log.txt" 2>&1
python -m bench.pairs "$out/data" "$out"/*-[012]
