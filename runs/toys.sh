#!/bin/bash
# Which part costs rank? Three seeds of eleven toys: bash runs/toys.sh [OUT]. Run it again to continue.
# Each run writes NAME-SEED, NAME-SEED-rank (with rank.json) and NAME-SEED.log to OUT [out/toys]. Two runs go at a time,
# with one thread each.
set -eo pipefail
export out=${1-out/toys} OMP_NUM_THREADS=1

toy() {  # NAME SEED FLAGS...
    run=$out/$1-$2
    [ ! -e "$run-rank/rank.json" ] || return 0
    echo "+ python train.py --seed $2 --out $run --eval-interval 500 ${*:3}" >> "$run.log"
    python train.py --seed "$2" --out "$run" --eval-interval 500 "${@:3}" >> "$run.log" 2>&1
    python rank.py "$run" --out "$run-rank" >> "$run.log" 2>&1
    echo "$(date +%H:%M) $1 $2"
}

each_seed() {  # NAME FLAGS...: a line for each seed
    for seed in 0 1 2; do echo "toy $1 $seed ${*:2}"; done
}

export -f toy
mkdir -p "$out"
{
    for rate in 0.15 0.4; do
        for model in mae-lm enc-mask mlm; do each_seed "$model-$rate" --ablation "$model" --mask-rate "$rate"; done
    done
    for model in mae-lm mlm; do each_seed "thin-$model" --ablation "$model" --encoder-layers 6 --encoder-dim 32; done
    for delta in 0.25 0.5 0.75; do each_seed "delta-$delta" --mask-in-encoder "$delta"; done
} | xargs -P 2 -L 1 bash -eo pipefail -c '"$@"' -
