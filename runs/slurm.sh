#!/bin/bash
#SBATCH --job-name maelm
#SBATCH --nodes 8
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --time 04:00:00
#SBATCH --signal TERM@120

# base on 64 GPUs: sbatch runs/slurm.sh TEXT, from the root of the repository.
# First, where the same folders are: python -m venv .venv, pip install -r requirements.txt into it, and
#     python train.py --preset base --data TEXT --cache cache --prepare
# 120 seconds before the time limit, Slurm sends SIGTERM. All processes finish their step, the first one writes a
# checkpoint, and the job ends. Submit it again to go on. If one node fails, --kill-on-bad-exit ends the others.
# --out and the cache have to be on a disk that all nodes share.

source .venv/bin/activate
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
srun --kill-on-bad-exit=1 --cpus-per-task "$SLURM_CPUS_PER_TASK" \
    torchrun --nnodes "$SLURM_NNODES" --nproc_per_node 8 --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d \
    --rdzv_endpoint "$head_node:29500" --shutdown-timeout 100 \
    train.py --preset base --data "${1:?TEXT}" --cache cache
