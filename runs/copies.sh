#!/bin/bash
# Three experiments about heads that copy: bash runs/copies.sh GLUE [OUT]. See bench/results/comparing.md. Run it again to
# continue. Two processes run at a time, with one thread each.
set -eo pipefail
export glue=$1 out=${2-out/copies} OMP_NUM_THREADS=1
mkdir -p "$out"
[ -e "$out/data/dev.jsonl" ] || python -m bench.copies pairs "$out/data"

pairs() { python finetune.py --init "$1" --task custom --data "$out/data" --epochs 8 --learning-rate 3e-4 --seeds 1 --out "$2-pairs"; }
stsb() { python finetune.py --init "$1" --task stsb --data "$glue" --epochs 3 --learning-rate 4e-4 --seeds 1 --out "$2-stsb"; }
docs() { python finetune.py --init "$1" --task docs --seeds 3 --out "$2-docs"; }

model() {  # NAME SEED FLAGS...
    run=$out/$1-$2
    python train.py --seed "$2" --out "$run" "${@:3}"
    pairs "$run" "$run"; stsb "$run" "$run"; docs "$run" "$run"
    python rank.py "$run" --controls --out "$run-rank"
}

masked() {  # SEED: an MLM for which all copies of a masked token are masked
    run=$out/mlm-no-copies-$1
    python -m bench.copies train --seed "$1" --ablation mlm --out "$run"
    pairs "$run" "$run"; stsb "$run" "$run"; docs "$run" "$run"
}

zeroed() {  # SEED: the MLM without its copying head, and without the other head of that layer
    run=$out/mlm-$1
    for other in "" other; do
        new=$run-without-${other:-copying}
        [ -e "$new/step_0001900.pt" ] || python -m bench.copies zero "$out/data" "$run" "$new" $other
        pairs "$new" "$new"; stsb "$new" "$new"
    done
}

fresh() { pairs "random:$out/mlm-0" "$out/random"; stsb "random:$out/mlm-0" "$out/random"; docs "random:$out/mlm-0" "$out/random"; }

export -f model masked zeroed fresh pairs stsb docs
parallel() { xargs -P 2 -L 1 bash -eo pipefail -c '"$@" >> "$out/log.txt" 2>&1 && date "+%H:%M $*"' -; }
{ for seed in 0 1 2; do echo model mlm $seed --ablation mlm; echo model mae-lm $seed; done; } | parallel
{ for seed in 0 1 2; do echo zeroed $seed; done; echo fresh; for seed in 0 1 2; do echo masked $seed; done; } | parallel
{ for seed in 0 1 2; do echo model enc-mask $seed --ablation enc-mask; done; } | parallel
python -m bench.copies attention "$out/data" "$out"/mlm-[012] "$out"/mae-lm-[012] "$out"/mlm-no-copies-[012]
