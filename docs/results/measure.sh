#!/usr/bin/env bash
# Measures on the GPU at hand what the tables of chapters 07 and 08 show: docs/results/measure.sh FOLDER [FLASHSTEPS [PART...]]
# Each part is a CSV file in FOLDER; without PART all are made. The peers want PyTorch.
set -euo pipefail
here=$(dirname "$0")
folder=$1
flashsteps=${2:-build/flashsteps}
parts=("${@:3}")
[ ${#parts[@]} -gt 0 ] || parts=(07_warp_partitioning 08_hopper_async sustained_08 ablation_08 peers_bf16 peers_bf16_backward 07_backward 08_backward
                                  07_backward_deterministic 08_backward_deterministic 08_fp8 quantise_08_fp8 accuracy_08_fp8)
mkdir -p "$folder"
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1 | sed 's/, /, driver /')

begin() { # FILE, what bench was told
  file=$folder/h200_bench_$1.csv
  case $1 in ablation_* | sustained_*) file=$folder/h200_$1.csv ;; esac
  echo "# date $(date +%F); GPU $gpu; command: docs/results/measure.sh FOLDER $flashsteps $1, which runs flashsteps bench $2" > "$file"
  echo "step,dtype,head_dim,causal,seq,batch,heads,pass,ms,ms_p10,ms_p90,tflops,bound_fraction,scratch_bytes" >> "$file"
}
rows() { # options of bench
  "$flashsteps" bench "$@" --format csv | tail -n +2 >> "$file"
}
each_mask() { # options of bench
  rows "$@"
  rows "$@" --causal
}

for part in "${parts[@]}"; do
  case $part in
  07_warp_partitioning)
    begin $part "STEP --dtype bf16 --head-dim D [--causal] [--seq N]"
    for d in 64 128; do
      for n in 1024 2048 4096; do each_mask 07/split_k 07/split_q --dtype bf16 --head-dim $d --seq $n; done
    done
    for d in 64 128 256; do each_mask 07/pipelined --dtype bf16 --head-dim $d; done ;;
  07_backward) begin $part "07/backward --dtype bf16 --head-dim D [--causal]"
    for d in 64 128; do each_mask 07/backward --dtype bf16 --head-dim $d; done ;;
  07_backward_deterministic) begin $part "07/backward --dtype bf16 --head-dim D [--causal] --deterministic"
    for d in 64 128; do each_mask 07/backward --dtype bf16 --head-dim $d --deterministic; done ;;
  08_hopper_async) begin $part "STEP --dtype bf16 --head-dim 64 --seq N; 08/overlapped --dtype bf16 --head-dim D [--causal]"
    for step in 08/tma 08/warp 08/pingpong; do for n in 1024 2048 4096; do rows $step --dtype bf16 --head-dim 64 --seq $n; done; done
    for d in 64 128 256; do each_mask 08/overlapped --dtype bf16 --head-dim $d; done ;;
  sustained_08) begin $part "08/overlapped --dtype bf16 --head-dim D [--causal] --seq N --launches 40"
    for d in 64 128 256; do for n in 8192 16384; do each_mask 08/overlapped --dtype bf16 --head-dim $d --seq $n --launches 40; done; done ;;
  ablation_08) begin $part "08 --pass forward --batch 4 --heads 16 --seq 8448 --head-dim 128 --dtype bf16|fp16"
    for dtype in bf16 fp16; do
      rows 08/tma 08/warp 08/pingpong 08/overlapped --batch 4 --heads 16 --seq 8448 --head-dim 128 --dtype $dtype
    done ;;
  08_backward) begin $part "08/backward --dtype bf16 --head-dim D [--causal]"
    for d in 64 128; do each_mask 08/backward --dtype bf16 --head-dim $d; done ;;
  08_backward_deterministic) begin $part "08/backward --dtype bf16 --head-dim D [--causal] --deterministic"
    for d in 64 128; do each_mask 08/backward --dtype bf16 --head-dim $d --deterministic; done ;;
  08_fp8) begin $part "08/fp8 --head-dim D [--causal]"
    for d in 64 128 256; do each_mask 08/fp8 --head-dim $d; done ;;
  quantise_08_fp8)
    file=$folder/h200_$part.csv
    echo "# date $(date +%F); GPU $gpu; from bf16; command: docs/results/measure.sh FOLDER $flashsteps $part, which runs flashsteps bench 08/fp8 --head-dim D --seq N [--no-rotation]" > "$file"
    echo "head_dim,seq,rotation,ms" >> "$file"
    quantise_rows() { # rotated or not, as 1 or 0; options of bench
      local rotated=$1
      shift
      "$flashsteps" bench 08/fp8 "$@" --format csv | awk -F, -v r="$rotated" '$8 == "quantise" { print $3 "," $5 "," r "," $9 }' >> "$file"
    }
    for d in 64 128 256; do
      for n in 512 4096 16384; do
        quantise_rows 1 --head-dim $d --seq $n
        quantise_rows 0 --head-dim $d --seq $n --no-rotation
      done
    done ;;
  accuracy_08_fp8)
    file=$folder/h200_$part.csv
    echo "# date $(date +%F); GPU $gpu; command: docs/results/measure.sh FOLDER $flashsteps $part, which runs flashsteps accuracy" > "$file"
    "$flashsteps" accuracy --format csv >> "$file" ;;
  peers_bf16) python3 "$here/time_peers.py" forward "$folder/h200_peers_bf16.csv" --sustained ;;
  peers_bf16_backward) python3 "$here/time_peers.py" backward "$folder/h200_peers_bf16_backward.csv" --head-dims 64 128 ;;
  *) echo "measure.sh: no part '$part'; there are ${parts[*]}" >&2; exit 2 ;;
  esac
done
