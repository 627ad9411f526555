#!/bin/bash
#SBATCH --job-name maelm
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 8
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 8
#SBATCH --time 04:00:00
#SBATCH --signal B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode append

# Trains base on 16 GPUs, one process per GPU; docs/large.md says why more are not faster. From the root of the repository, on a disk that all nodes share:
#     python -m venv .venv && .venv/bin/pip install -r requirements.txt
#     .venv/bin/python train.py --preset base --data TEXT --cache cache --prepare
#     sbatch runs/slurm.sh --data TEXT [--FLAG VALUE ...]        takes all flags of train.py
# With --array 0-2 before runs/slurm.sh, three such jobs train seeds 0, 1 and 2, each in a folder of its own.
# The log of each process is logs/JOB/rank-N.log; rank 0's log shows the progress.
#
# 300 seconds before the time limit, Slurm sends SIGUSR1 to this script, and srun passes it on to all processes. They
# finish their step, rank 0 saves a checkpoint, and the job goes back to the queue, where the same command continues the
# run. After any other error, the job ends. Slurm itself requeues a job that is preempted or whose node fails.
#
# This was tried on one machine, with stand-ins for srun and scontrol. Only a real cluster shows whether Slurm sends the
# signal in time, srun passes it on, and the job may be requeued: try a job with --time 00:10:00.

set -euo pipefail

fail() {
    echo "slurm.sh: $1" >&2
    exit 2
}
[[ -n ${SLURM_JOB_ID:-} ]] || fail "start it with sbatch runs/slurm.sh --data TEXT [--FLAG VALUE ...]"
[[ $# -gt 0 ]] || fail "train.py needs flags, at least --data TEXT"
cd "$SLURM_SUBMIT_DIR"
[[ -f train.py ]] || fail "$SLURM_SUBMIT_DIR has no train.py: call sbatch in the root of the repository"
[[ -f .venv/bin/activate ]] || fail "$SLURM_SUBMIT_DIR has no .venv: make it as the comments in runs/slurm.sh say"
source .venv/bin/activate
python -c "import torch, datasets" || fail "PyTorch or datasets is missing in .venv: install requirements.txt"

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}  # the first node
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # differs between the jobs on that node
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    set -- --seed "$SLURM_ARRAY_TASK_ID" --out "out/array-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID" "$@"
fi
[[ " $* " == *" --init"* ]] || set -- --preset base "$@"  # a run has its own preset
logs=logs/$SLURM_JOB_ID
mkdir -p "$logs"

# Ranks come from Slurm, not from torchrun: its flags differ between versions, and it gives processes at most 30 seconds
# to stop. With exec, Python itself receives the signal.
srun --kill-on-bad-exit=1 --cpus-per-task "${SLURM_CPUS_PER_TASK:-8}" --output "$logs/rank-%t.log" --open-mode append \
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec python train.py "$@"' \
    train.py --cache cache "$@" &
training=$!

noticed=no
notice() {
    noticed=yes
    kill -USR1 "$training"
}
trap notice USR1

code=0
wait "$training" || code=$?
if [[ $noticed == yes ]]; then  # the signal interrupted `wait`
    code=0
    wait "$training" || code=$?
    echo "slurm.sh: stopped with exit code $code before the time limit; back to the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
