#!/bin/bash
# Questions for one GPU, the most important first: bash runs/gpu.sh TEXT GLUE [OUT]. Run it again to continue.
# TEXT and GLUE are as in runs/evidence.sh. TINY=1 tries the whole script on a CPU in minutes, and measures nothing.
set -u
text=${1:?TEXT} glue=${2:?GLUE} out=${3:-out/gpu}
speed="python -m bench.speed --device cuda" base_speed="--sizes base" small_speed="--sizes small"
train="python train.py --data $text --preset"
short=5000 half=600 all=1200
base="base --batch-size 256 --max-steps 20000 --warmup-steps 1600"
tune="--task docs --learning-rate 1.2e-4 --seeds 3 --epochs 30"
export PRESET=small SEEDS="0 1 2" RATE=1.2e-4 JOBS=6
if [ -n "${TINY:-}" ]; then
    speed="python -m bench.speed --rows 2 --turns 1" base_speed="--sizes toy" small_speed="--sizes toy"
    short=6 half=3 all=6 glue=""
    base="toy --max-steps 12 --warmup-steps 0"
    tune="--task docs --seeds 1 --epochs 0.1"
    export PRESET=toy SEEDS=0 JOBS=2 TRAIN="--max-steps 12 --warmup-steps 0" DOCS_EPOCHS=0.1
else
    nvidia-cuda-mps-control -d || true  # processes share the GPU
fi
mkdir -p "$out"

once() {  # NAME COMMAND...: run it, unless it has already succeeded
    [ -e "$out/$1.done" ] && return
    echo "$(date +%H:%M) $1"
    if "${@:2}" >> "$out/$1.log" 2>&1; then touch "$out/$1.done"; else echo "$1 failed: see $out/$1.log"; fi
}

# 1. Is it right?
[ -n "${TINY:-}" ] || once tests env CUDA_VISIBLE_DEVICES=0 pytest -q -m cuda -n 0
# 2. Is it faster? A setting is adopted if base gains 3 % and more than twice the spread.
once steps $speed $base_speed --kinds eager compiled --out "$out/base.json"
once small-steps $speed $small_speed --models mae-lm mlm --kinds eager compiled --out "$out/small.json"
once positions $speed $base_speed --models mae-lm no-relative --kinds compiled --out "$out/positions.json"
compiled="$base_speed --models mae-lm --kinds compiled"
once cublaslt env TORCH_BLAS_PREFER_CUBLASLT=1 $speed $compiled --out "$out/cublaslt.json"
once autotune env TORCHINDUCTOR_MAX_AUTOTUNE=1 $speed $compiled --out "$out/autotune.json"
once again $speed $compiled --out "$out/again.json"
# 3. small on its own schedule: all claims, and copying.
once small bash runs/evidence.sh "$text" "$glue" "$out/small"
once copying python -m course.copying "$out"/small/train-m*-?
# 4. How deep should the decoder of small be? The runs share the GPU.
for layers in 2 4; do
    for relative in decoder-relative no-decoder-relative; do
        name=decoder-$layers-$relative
        once $name $train $PRESET --decoder-layers $layers --$relative --max-steps $short --warmup-steps 0 --out "$out/$name" &
    done
done
wait
for run in "$out"/decoder-?-*relative; do
    once "docs-$(basename "$run")" python finetune.py --init "$run" $tune --out "$run-docs" &
done
wait
once copying-decoders python -m course.copying "$out"/decoder-?-*relative
# 5. Does base learn? The run is stopped once and continued.
once base $train $base --stop-at $half --out "$out/base"
once base-continued $train $base --stop-at $all --out "$out/base"
