#!/bin/bash
# The evidence in docs/results.md: bash runs/evidence.sh TEXT [GLUE] [OUT]. Run it again to continue.
# TEXT is the value of train.py's --data. GLUE is a folder with the files of GLUE's original releases, or hub; if it is
# "" or missing, only docs is fine-tuned. Each job writes to NAME and NAME.log in OUT [out/evidence]. Settings:
#   SEEDS="3 4 5"     of pre-training [0 1 2]         PRESET, TRAIN="--max-steps 5000"   flags of train.py [laptop]
#   DOCS_EPOCHS, RATE of fine-tuning [as in bench/results/plan.md]     JOBS   at a time, one thread each [one per core]
set -eo pipefail
export text=${1:?TEXT} glue=${2-} out=${3-out/evidence} preset=${PRESET-laptop} OMP_NUM_THREADS=${OMP_NUM_THREADS-1}
seeds=${SEEDS-0 1 2}
export tasks=docs
if [ -n "$glue" ]; then tasks="docs sst2 cola mrpc rte stsb"; fi

job() {  # NAME COMMAND...
    echo "$(date +%H:%M) $1"
    log=$out/$1.log
    echo "+ ${*:2} --out $out/$1" >> "$log"
    TIMEFORMAT="= %0R s"
    { time "${@:2}" --out "$out/$1"; } >> "$log" 2>&1 || { echo "$1 failed: see the end of $log"; return 1; }
}

tune() {  # NAME INIT TASK RATE
    data=$glue epochs=3
    case $3 in
        docs) data="" epochs=${DOCS_EPOCHS-30} ;;
        sst2) epochs=1 ;;
    esac
    if [ "$data" = hub ]; then data=""; fi
    set -- "$@" ${data:+--data "$data"}
    job "$1" python finetune.py --init "$2" --task "$3" --epochs "$epochs" --learning-rate "$4" --seeds 3 "${@:5}"
}

model() {  # MODEL SEED: pre-train, measure, fine-tune
    run=$out/train-$1-$2
    job "train-$1-$2" python train.py --preset "$preset" --data "$text" --ablation "$1" --seed "$2" $TRAIN
    [ -e "$out/rank-$1-$2/rank.json" ] || job "rank-$1-$2" python rank.py "$run" --tokens 300000
    for task in $tasks; do
        if [ "$task" != sst2 ] || [ -n "$RATE" ]; then
            tune "$task-$1-$2" "$run" "$task" "${RATE:-4e-4}"
        else
            tune "sst2-$1-$2" "$run" sst2 8e-4
            tune "common-sst2-$1-$2" "$run" sst2 4e-4
        fi
    done
}

floor() {  # TASK: the randomly initialized baseline
    tune "floor-$1" "random:$out/train-mlm-${seeds%% *}" "$1" "${RATE:-4e-4}"
}

side_by_side() { xargs -P "${JOBS:-$(getconf _NPROCESSORS_ONLN)}" -L 1 bash -eo pipefail -c '"$@"' -; }

export seeds
export -f job tune model floor
mkdir -p "$out"
trap 'python -m bench.evidence --collect "$out"' EXIT  # also after Ctrl-C: every program saves its progress
for seed in $seeds; do printf 'model mae-lm %s\nmodel mlm %s\n' "$seed" "$seed"; done | side_by_side
printf 'floor %s\n' $tasks | side_by_side
