#!/bin/bash
# Questions for one GPU, the most important first: bash runs/gpu.sh TEXT GLUE [OUT]. Run it again to continue.
# TEXT is the value of train.py's --data; GLUE is a folder with the Hub's files. JOBS models share the card.
set -u
text=${1:?TEXT} glue=${2:?GLUE} out=${3:-out/gpu} jobs=${JOBS:-4}
train=(python train.py --preset small --data "$text")
speed=(python -m bench.speed --device cuda)
declare -A adamw=([0.5]=1e-3 [1]=2e-3 [2]=4e-3) muon=([0.5]=1e-2 [1]=2e-2 [2]=4e-2)  # 1: the preset's rates
mkdir -p "$out"

once() {  # NAME COMMAND...: run it, unless it has already succeeded
    [ ! -e "$out/$1.done" ] || return 0
    echo "$(date +%H:%M) $1"
    if "${@:2}" >> "$out/$1.log" 2>&1; then touch "$out/$1.done"; else echo "$1 failed: see $out/$1.log"; return 1; fi
}

pretrain() {  # FACTOR NAME FLAGS...: pre-train small, with the preset's rates times FACTOR
    once "$2" "${train[@]}" --learning-rate ${adamw[$1]} --muon-learning-rate ${muon[$1]} "${@:3}" --out "$out/$2"
}

best() {  # NAME: the factor whose run with seed 0 has the lowest validation loss at its end
    for factor in 1 0.5 2; do
        grep -o '"val_loss": [0-9.]*' "$out/$1-0-$factor/log.jsonl" | tail -n 1 | sed "s/$/ $factor/"
    done | sort -k 2n | head -n 1 | cut -d' ' -f 3
}

tune() {  # RUN: fine-tuning at two rates, and linear probes with all labels and with 8 per class
    local task rate pooling of_task  # loops below have variables of these names
    for task in stsb docs mrpc rte cola sst2; do
        of_task=(python finetune.py --init "$out/$1" --task $task)
        [ $task = docs ] || of_task+=(--data "$glue")
        for pooling in mean cls; do
            once "$1-$task-$pooling" "${of_task[@]}" --frozen $pooling --out "$out/$1-$task-$pooling"
            [ $task = stsb ] || once "$1-$task-$pooling-8" "${of_task[@]}" --frozen $pooling --shots 8 --seeds 20 \
                --out "$out/$1-$task-$pooling-8"
        done
        for rate in 1.2e-4 3e-4; do
            once "$1-$task-$rate" "${of_task[@]}" --seeds 3 --epochs 3 --learning-rate $rate --out "$out/$1-$task-$rate"
        done
    done
}

share() {  # COMMAND...: run it beside others, JOBS at a time
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    "$@" &
}

model() { pretrain "$@" && tune "$2"; }

# 1. Is it right? Do two processes on one card have the losses of one?
once tests env CUDA_VISIBLE_DEVICES=0 pytest -q -m cuda -n 0
forty=("${train[@]}" --max-steps 40 --compile off --micro-batch-size 64 --log-interval 5)
once one "${forty[@]}" --out "$out/one"
once two torchrun --standalone --nproc_per_node 2 --no-python bash -c 'LOCAL_RANK=0 NCCL_HOSTID=$RANK "$@"' - \
    env NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=lo "${forty[@]}" --out "$out/two"
# 2. Which rates? Seed 0 decides, by the validation loss, for each row and fraction of masks. Then: does small's MAE-LM
# lead on STS-B with half of the text masked, whatever the seed? Does enc-mask?
for rate in 0.5 0.15; do
    for row in mae-lm mlm enc-mask; do
        for factor in 1 0.5 2; do
            share pretrain $factor $row-$rate-0-$factor --max-steps 5000 --ablation $row --mask-rate $rate
        done
    done
done
wait
for seed in 1 2; do
    for rate in 0.5 0.15; do
        for row in mae-lm mlm enc-mask; do
            share model "$(best $row-$rate)" $row-$rate-$seed --max-steps 5000 --ablation $row --mask-rate $rate \
                --seed $seed
        done
    done
done
wait
# 3. Does the lead last? The MLM has as much time as MAE-LM needs for the preset's 20,000 steps.
once speed-small "${speed[@]}" --preset small --compile --models "mae-lm --mask-rate 0.5" "mlm --mask-rate 0.5" \
    --out "$out/small.json"
steps=$(python -c "import json, statistics, sys
mae, mlm = map(statistics.median, json.load(open(sys.argv[1]))['tokens_per_second'].values())
print(round(20000 * mlm / mae))" "$out/small.json")
share model "$(best mae-lm-0.5)" long-mae-lm --mask-rate 0.5
share model "$(best mlm-0.5)" long-mlm --mask-rate 0.5 --ablation mlm --max-steps "$steps"
wait
# 4. Where does the time of base go? no-relative shows how much the relative bias costs.
once speed-eager "${speed[@]}" --preset base --rows 64 --out "$out/eager.json"
once speed-compiled "${speed[@]}" --preset base --rows 64 --compile --models mae-lm mlm no-relative \
    --out "$out/compiled.json"
# 5. How does base learn, for as long as the card is there? Its tokens/s, compared with those of question 4, show
# whether steps wait for batches.
once base python train.py --preset base --data "$text" --out "$out/base"
