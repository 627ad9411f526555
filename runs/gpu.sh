#!/bin/bash
# Questions for one GPU, the most important first: bash runs/gpu.sh TEXT GLUE [OUT]. Run it again to continue.
# TEXT is the value of train.py's --data; GLUE is a folder with the Hub's files of stsb and mrpc.
set -u
text=${1:?TEXT} glue=${2:?GLUE} out=${3:-out/gpu}
train=(python train.py --preset small --data "$text")
speed=(python -m bench.speed --device cuda --preset base)
mkdir -p "$out"

once() {  # NAME COMMAND...: run it, unless it has already succeeded
    [ ! -e "$out/$1.done" ] || return 0
    echo "$(date +%H:%M) $1"
    if "${@:2}" >> "$out/$1.log" 2>&1; then touch "$out/$1.done"; else echo "$1 failed: see $out/$1.log"; return 1; fi
}

tune() {  # RUN: fine-tuning at two rates and a linear probe, on STS-B and MRPC; on docs, probes with 8 labels per class
    local rate  # the loop below has a variable of this name
    for task in stsb mrpc; do
        of_task=(python finetune.py --init "$out/$1" --task $task --data "$glue")
        for rate in 1.2e-4 3e-4; do
            once "$task-$1-$rate" "${of_task[@]}" --seeds 3 --epochs 3 --learning-rate $rate --out "$out/$1-$task-$rate"
        done
        once "$task-$1-probe" "${of_task[@]}" --frozen --out "$out/$1-$task-probe"
    done
    for pooling in mean cls; do
        once "docs-$1-$pooling" python finetune.py --init "$out/$1" --task docs --frozen $pooling --shots 8 --seeds 20 \
            --out "$out/$1-docs-$pooling"
    done
}

model() {  # NAME FLAGS...: pre-train small, then fine-tune and probe it
    once "$1" "${train[@]}" "${@:2}" --out "$out/$1" && tune "$1"
}

# 1. Is it right?
once tests env CUDA_VISIBLE_DEVICES=0 pytest -q -m cuda -n 0
# 2. Does small's MAE-LM lead on STS-B with half of the text masked, whatever the seed? Does enc-mask?
for seed in 1 2 0; do
    for rate in 0.5 0.15; do
        for row in mae-lm mlm enc-mask; do
            model $row-$rate-$seed --max-steps 5000 --ablation $row --mask-rate $rate --seed $seed
        done
    done
done
# Is it the decoder that keeps small's MAE-LM behind with 15% masks?
model decoder-layers-1 --max-steps 5000 --decoder-layers 1 --seed 1
model no-decoder-relative --max-steps 5000 --no-decoder-relative --seed 1
# 3. Does the lead last?
model long-mae-lm --mask-rate 0.5
model long-mlm --mask-rate 0.5 --ablation mlm
# 4. Where does the time of base go? no-relative shows how much the relative bias costs.
once speed-eager "${speed[@]}" --rows 64 --out "$out/eager.json"
once speed-compiled "${speed[@]}" --rows 64 --compile --models mae-lm mlm no-relative --out "$out/compiled.json"
# 5. Does base learn?
once base python train.py --preset base --data "$text" --stop-at 600 --out "$out/base"
