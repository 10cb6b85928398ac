#!/usr/bin/env bash
# Measures on the GPU at hand what the tables of chapters 02 to 08 show, and does the long runs of tests/README.md: docs/results/measure.sh FOLDER [FLASHSTEPS [PART...]]
# Each part is a CSV file in FOLDER; without PART all are made. The peers want PyTorch.
set -euo pipefail
here=$(dirname "$0")
folder=$1
flashsteps=${2:-build/flashsteps}
parts=("${@:3}")
[ ${#parts[@]} -gt 0 ] || parts=(02_naive_gpu 03_tiling 04_online_softmax 05_kernel_fusion 06_recompute_backward peers_fp32 peers_fp32_backward
                                  07_warp_partitioning peers_bf16_07 08_hopper_async sustained_08 ablation_08 peers_bf16
                                  07_backward 07_backward_deterministic 08_backward 08_backward_deterministic peers_bf16_backward
                                  08_fp8 quantise_08_fp8 accuracy_08_fp8 ideas_08 random soak big)
mkdir -p "$folder"
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1 | sed 's/, /, driver /')
# What the chip's units and its memory reach, as bench says it above its table.
rates=$("$flashsteps" bench 02/forward --batch 1 --heads 1 --seq 64 | sed -n '1s/.*measured: /measured /p')

begin() { # FILE, what bench was told
  file=$folder/h200_bench_$1.csv
  case $1 in ablation_* | sustained_* | ideas_*) file=$folder/h200_$1.csv ;; esac
  echo "# date $(date +%F); GPU $gpu; $rates; command: docs/results/measure.sh FOLDER $flashsteps $1, which runs flashsteps bench $2" > "$file"
  echo "step,dtype,head_dim,causal,seq,batch,heads,pass,ms,ms_p10,ms_p90,tflops,bound_fraction,scratch_bytes" >> "$file"
}
rows() { # options of bench
  "$flashsteps" bench "$@" --format csv | tail -n +2 >> "$file"
}
each_mask() { # options of bench
  rows "$@"
  rows "$@" --causal
}
fp32_chapter() { # its last step, and the steps before it, which are slower and timed at fewer lengths
  local last=$1 step n d
  shift
  for step in "$@"; do for n in 1024 2048 4096; do rows $step --seq $n; done; done
  each_mask $last
  for d in 32 128; do rows $last --seq 4096 --head-dim $d; done
}

for part in "${parts[@]}"; do
  case $part in
  02_naive_gpu) begin $part "02 --seq N [--causal], from N 8192 on with --launches 3"
    for n in 512 1024 2048 4096; do rows 02 --seq $n; done
    for n in 8192 16384; do rows 02 --seq $n --launches 3; done
    rows 02 --seq 2048 --causal ;;
  03_tiling) begin $part "STEP [--seq N] [--causal] [--head-dim D]"
    fp32_chapter 03/register_tiles 03/shared_tiles ;;
  04_online_softmax) begin $part "STEP [--seq N] [--causal] [--head-dim D]"
    fp32_chapter 04/online 04/three_pass ;;
  05_kernel_fusion) begin $part "STEP [--seq N] [--causal] [--head-dim D]"
    fp32_chapter 05/register_tiled 05/algorithm1 05/forward ;;
  06_recompute_backward) begin $part "STEP [--seq N] [--causal] [--head-dim D]"
    fp32_chapter 06/register_tiled 06/backward ;;
  07_warp_partitioning)
    begin $part "STEP --dtype bf16 --head-dim D [--causal] [--seq N]; the last two rows with --dtype fp16"
    for d in 64 128; do
      for n in 1024 2048 4096; do each_mask 07/split_k 07/split_q --dtype bf16 --head-dim $d --seq $n; done
    done
    for d in 64 128 256; do each_mask 07/pipelined --dtype bf16 --head-dim $d; done
    for d in 64 128; do rows 07/pipelined --dtype fp16 --head-dim $d --seq 2048; done ;;
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
  ideas_08) begin $part "STEP and 30_without_… (docs/ideas.py --all) --dtype bf16 --head-dim D [--causal] --seq N"
    for step in overlapped warp_specialized backward; do
      without=$("$flashsteps" list --format csv | cut -d, -f1 | grep "^30_without_.*/$step$") ||
        { echo "measure.sh: first docs/ideas.py --all, and build" >&2; exit 2; }
      dims="64 128 256"
      [ $step = overlapped ] || dims="64 128"
      for d in $dims; do
        for n in 1024 8192; do each_mask 08_hopper_async/$step $without --dtype bf16 --head-dim $d --seq $n; done
      done
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
    echo "# date $(date +%F); GPU $gpu; command: docs/results/measure.sh FOLDER $flashsteps $part, which runs flashsteps accuracy --head-dim D (16 heads, N 4,096, 512 rows of O compared); paper: FlashAttention-3 (Shah et al. 2024), Table 3, whose N and head dim are not given" > "$file"
    echo "head_dim,dtype,how,rmse,relative" >> "$file"
    for d in 64 128 256; do
      "$flashsteps" accuracy --head-dim $d --format csv | tail -n +2 | awk -F, -v d=$d '{ print d "," $1 "," $2 "," $4 "," $5 }' >> "$file"
    done
    # FlashAttention-3, Table 3
    printf 'paper,%s,\n' fp16,unfused,3.2e-4 fp16,fused,1.9e-4 "e4m3,tensor scales,2.4e-2" "e4m3,tile scales and rotation,9.1e-3" \
      "e4m3,without tile scales,9.3e-3" "e4m3,without rotation,2.4e-2" >> "$file" ;;
  random) # of 2,000 drawn cases for each pass of each step: how many failed
    file=$folder/h200_long_random.csv
    seed=2030
    echo "# date $(date +%F); GPU $gpu; command: docs/results/measure.sh FOLDER $flashsteps $part, which runs flashsteps check STEP --random 2000 --seed $seed --device gpu" > "$file"
    echo "step,pass,dtype,cases,failed" >> "$file"
    steps=$("$flashsteps" list --format csv | awk -F, '$1 ~ /^0[2-9]_/ { print $1 }' | sort -u)
    for step in $steps; do # all at once: most of it is the oracle's time
      ("$flashsteps" check "$step" --random 2000 --seed $seed --device gpu > "$folder/random_${step//\//_}.txt" 2>&1 || true) &
    done
    wait
    for step in $steps; do
      awk -v step="$step" '$1 == step && $4 ~ /^[0-9]+$/ { print $1 "," $2 "," $3 "," $4 "," $5; found = 1 }
        END { if (!found) print step ",,,,did not run" }' "$folder/random_${step//\//_}.txt" >> "$file"
    done ;;
  soak)
    file=$folder/h200_long_soak.csv
    echo "# date $(date +%F); GPU $gpu; command: docs/results/measure.sh FOLDER $flashsteps $part, which runs tests/soak 5" > "$file"
    { "$(dirname "$flashsteps")/tests/soak" 5 || true; } | tail -1 |
      sed -E 's/^([0-9]+) kernels, ([0-9]+) rounds, ([0-9]+) launches in ([0-9.]+) minutes; results that differed: ([0-9]+); memory grew by ([-0-9.]+) MB on the device, ([-0-9.]+) MB on the host .*$/kernels,rounds,launches,minutes,differed,device_grew_mb,host_grew_mb\n\1,\2,\3,\4,\5,\6,\7/' >> "$file" ;;
  big)
    file=$folder/h200_long_big.csv
    echo "# date $(date +%F); GPU $gpu; command: docs/results/measure.sh FOLDER $flashsteps $part, which runs tests/long/big.sh $flashsteps" > "$file"
    echo "result,seconds,command" >> "$file"
    { bash "$here/../../tests/long/big.sh" "$flashsteps" || true; } | sed -nE 's/^(ok|FAILED) +([0-9]+) s +(.*)$/\1,\2,\3/p' >> "$file" ;;
  peers_fp32) python3 "$here/time_peers.py" forward "$folder/h200_peers_fp32.csv" --dtype float32 --head-dims 64 --peers efficient math ;;
  peers_fp32_backward)
    python3 "$here/time_peers.py" backward "$folder/h200_peers_fp32_backward.csv" --dtype float32 --head-dims 64 --peers efficient math ;;
  peers_bf16_07) python3 "$here/time_peers.py" forward "$folder/h200_peers_bf16_07.csv" --peers flash2 ;;
  peers_bf16) python3 "$here/time_peers.py" forward "$folder/h200_peers_bf16.csv" --sustained ;;
  peers_bf16_backward) python3 "$here/time_peers.py" backward "$folder/h200_peers_bf16_backward.csv" --head-dims 64 128 ;;
  *) echo "measure.sh: no part '$part'; there are ${parts[*]}" >&2; exit 2 ;;
  esac
done
