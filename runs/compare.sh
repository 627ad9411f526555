#!/bin/bash
# From text to Tables 1, 2 and 3 for base, on one node with eight H100s: bash runs/compare.sh TEXT
# TEXT is the value of --data. GLUE and SQuAD come from the Hugging Face Hub. The hours are estimates from FLOPs:
# training at a quarter of the peak, as measured on one H100, fine-tuning at a tenth. Run the script again to continue.
set -e
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT  # after Ctrl-C, background jobs would go on
text=${1:?TEXT}
on_node() { torchrun --standalone --nproc_per_node 8 "$@"; }

glue() {  # RUN: one task per GPU, then the average
    local gpu=0 task
    for task in mnli qqp qnli sst2 cola rte mrpc stsb; do
        CUDA_VISIBLE_DEVICES=$gpu python finetune.py --init "out/$1" --task $task --sweep --out "out/glue-$1/$task" &
        gpu=$((gpu + 1))
    done
    wait
    python finetune.py --init "out/$1" --task glue --sweep
}

python train.py --preset base --data "$text" --prepare
on_node train.py --preset base --data "$text"                                            # 12 hours
on_node train.py --preset base --data "$text" --ablation mlm                             # 11 hours: equal steps
on_node train.py --preset base --data "$text" --ablation mlm --max-steps 146300 --out out/base-mlm-compute  # 12: equal FLOPs

python rank.py out/base out/base-mlm out/base-mlm-compute --out out/table-3           # minutes: Figure 1 and Table 3
for run in base base-mlm base-mlm-compute; do
    glue $run                                                                         # 7 hours: Table 1
    python finetune.py --init out/$run --task squad2 --sweep                          # 8 hours
done

for row in enc-mask enc-mask-dec-resets random-replace misaligned no-relative bi+cross uni+cross cross dec-2 dec-6 dec-512 dec-1024; do
    on_node train.py --preset base --data "$text" --ablation $row                        # about 12 hours each: Table 2
    glue base-$row
done
