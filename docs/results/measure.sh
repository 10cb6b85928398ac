#!/usr/bin/env bash
# Measures on an H200 what most tables of chapters 02 to 08 show, and does the long runs of tests/README.md:
#
#     docs/results/measure.sh FOLDER [FLASHSTEPS [PART...]]
#
# Each part becomes a CSV file in FOLDER, which is there when the part is done and not before; without PART all are made.
# Exit code 1: a long run found something. The peers want PyTorch, ideas wants the kernels of docs/ideas.py --all in
# the build, soak takes five minutes, or SOAK_MINUTES. (Not from here: counters, sanitizers, and what tests/peers
# measures, whose CSV files say how; nor LSE of e4m3: compare_lse.py.)
set -euo pipefail
here=$(dirname "$0")
known=(02_naive_gpu 03_tiling 04_online_softmax 05_kernel_fusion 06_recompute_backward peers_fp32 peers_fp32_backward
       07_warp_partitioning peers_bf16_07 08_hopper_async sustained_08 ablation_08 peers_bf16
       07_backward 07_backward_deterministic 08_backward 08_backward_deterministic peers_bf16_backward
       08_fp8 quantise_08_fp8 accuracy_08_fp8 ideas random soak big_grid big_lengths big_queries big_keys)
fail() { echo "measure.sh: $*" >&2; exit 2; }
[ $# -ge 1 ] || fail "say into which folder: measure.sh FOLDER [FLASHSTEPS [PART...]]"
folder=$1
flashsteps=${2:-build/flashsteps}
parts=("${@:3}")
[ ${#parts[@]} -gt 0 ] || parts=("${known[@]}")
for part in "${parts[@]}"; do
  [[ " ${known[*]} " == *" $part "* ]] || fail "no part '$part'; there are ${known[*]}"
done
[ -x "$flashsteps" ] || fail "$flashsteps is no program; build it, or say where it is"

# Steps as `list` names them, that match a pattern.
steps_like() { "$flashsteps" list --format csv | cut -d, -f1 | grep -E "$1" | sort -u; }
for part in "${parts[@]}"; do
  [ $part = ideas ] || continue
  for idea in $(python3 "$here/../ideas.py" | cut -d' ' -f1); do
    steps_like "^30_without_$idea/" > /dev/null || fail "ideas: no step without '$idea'; first docs/ideas.py --all, and build"
  done
done

mkdir -p "$folder"
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sed -n '1s/, /, driver /p')
# What the chip's units and its memory reach, as bench says it above its table.
rates=$("$flashsteps" bench 02/forward --batch 1 --heads 1 --seq 64 | sed -n '1s/.*measured: /measured /p')
[ -n "$rates" ] || fail "bench does not say what it measured of the GPU"

begin() { # file name, which command a part runs, the columns
  file=$folder/$1
  { echo "# date $(date +%F); GPU $gpu; $rates; command: docs/results/measure.sh FOLDER build/flashsteps $part, which runs $2"
    echo "$3"; } > "$file.part"
}
end() {
  [ "$(wc -l < "$file.part")" -gt 2 ] || fail "$part: no row came of it"
  mv "$file.part" "$file"
}
begin_bench() { # file name, what bench is told
  begin "$1" "flashsteps bench $2" "step,dtype,head_dim,causal,seq,batch,heads,pass,ms,ms_p10,ms_p90,tflops,bound_fraction,scratch_bytes"
}
rows() { # options of bench
  "$flashsteps" bench "$@" --format csv | tail -n +2 >> "$file.part"
}
each_mask() { # options of bench
  rows "$@"
  rows "$@" --causal
}
fp32_chapter() { # its last step, and the steps before it, which are slower and timed at fewer lengths
  local last=$1 step n d
  shift
  begin_bench h200_bench_$part.csv "STEP [--seq N] [--causal] [--head-dim D]"
  for step in "$@"; do for n in 1024 2048 4096; do rows $step --seq $n; done; done
  each_mask $last
  for d in 32 128; do rows $last --seq 4096 --head-dim $d; done
  end
}
peers() { # options of time_peers.py
  python3 "$here/time_peers.py" "$1" "$folder/h200_$part.csv" "${@:2}"
}

found=0 # by the long runs
for part in "${parts[@]}"; do
  case $part in
  02_naive_gpu) begin_bench h200_bench_$part.csv "02 --seq N [--causal], from N 8192 on with --launches 3"
    for n in 512 1024 2048 4096; do rows 02 --seq $n; done
    for n in 8192 16384; do rows 02 --seq $n --launches 3; done
    rows 02 --seq 2048 --causal
    end ;;
  03_tiling) fp32_chapter 03/register_tiles 03/shared_tiles ;;
  04_online_softmax) fp32_chapter 04/online 04/three_pass ;;
  05_kernel_fusion) fp32_chapter 05/register_tiled 05/algorithm1 05/forward ;;
  06_recompute_backward) fp32_chapter 06/register_tiled 06/backward ;;
  07_warp_partitioning)
    begin_bench h200_bench_$part.csv "STEP --dtype bf16 --head-dim D [--causal] [--seq N]; the last two rows with --dtype fp16"
    for d in 64 128; do
      for n in 1024 2048 4096; do each_mask 07/split_k 07/split_q --dtype bf16 --head-dim $d --seq $n; done
    done
    for d in 64 128 256; do each_mask 07/pipelined --dtype bf16 --head-dim $d; done
    for d in 64 128; do rows 07/pipelined --dtype fp16 --head-dim $d --seq 2048; done
    end ;;
  07_backward | 08_backward) begin_bench h200_bench_$part.csv "${part/_//} --dtype bf16 --head-dim D [--causal]"
    for d in 64 128; do each_mask ${part/_//} --dtype bf16 --head-dim $d; done
    end ;;
  07_backward_deterministic | 08_backward_deterministic)
    step=${part:0:2}/backward
    begin_bench h200_bench_$part.csv "$step --dtype bf16 --head-dim D [--causal] --deterministic"
    for d in 64 128; do each_mask $step --dtype bf16 --head-dim $d --deterministic; done
    end ;;
  08_hopper_async)
    begin_bench h200_bench_$part.csv "STEP --dtype bf16 --head-dim 64 --seq N; 08/overlapped --dtype bf16 --head-dim D [--causal]"
    for step in 08/tma 08/warp 08/pingpong; do for n in 1024 2048 4096; do rows $step --dtype bf16 --head-dim 64 --seq $n; done; done
    for d in 64 128 256; do each_mask 08/overlapped --dtype bf16 --head-dim $d; done
    end ;;
  sustained_08) begin_bench h200_$part.csv "08/overlapped --dtype bf16 --head-dim D [--causal] --seq N --launches 40"
    for d in 64 128 256; do for n in 8192 16384; do each_mask 08/overlapped --dtype bf16 --head-dim $d --seq $n --launches 40; done; done
    end ;;
  ablation_08)
    begin_bench h200_$part.csv "08/tma 08/warp 08/pingpong 08/overlapped --batch 4 --heads 16 --seq 8448 --head-dim 128 --dtype bf16|fp16"
    for dtype in bf16 fp16; do
      rows 08/tma 08/warp 08/pingpong 08/overlapped --batch 4 --heads 16 --seq 8448 --head-dim 128 --dtype $dtype
    done
    end ;;
  ideas) begin_bench h200_$part.csv "STEP and 30_without_… --dtype bf16 --head-dim D [--causal] --seq N"
    for base in 07_warp_partitioning/pipelined 08_hopper_async/{overlapped,warp_specialized,backward}; do
      step=${base#*/}
      without=$(steps_like "^30_without_.*/$step$")
      dims="64 128"
      # pingpong beside it: at D 128 it has the shape that overlapped has without chosen_shapes.
      [ $step != overlapped ] || { dims="64 128 256"; without+=" 08_hopper_async/pingpong"; }
      for d in $dims; do
        for n in 512 8192; do each_mask $base $without --dtype bf16 --head-dim $d --seq $n; done
      done
    done
    end ;;
  08_fp8) begin_bench h200_bench_$part.csv "08/fp8 --head-dim D [--causal]"
    for d in 64 128 256; do each_mask 08/fp8 --head-dim $d; done
    end ;;
  quantise_08_fp8) begin h200_$part.csv "flashsteps bench 08/fp8 --head-dim D --seq N [--no-rotation], from bf16" "head_dim,seq,rotation,ms"
    quantise_rows() { # rotated or not, as 1 or 0; options of bench
      "$flashsteps" bench 08/fp8 "${@:2}" --format csv | awk -F, -v r="$1" '$8 == "quantise" { print $3 "," $5 "," r "," $9 }' >> "$file.part"
    }
    for d in 64 128 256; do
      for n in 512 4096 16384; do
        quantise_rows 1 --head-dim $d --seq $n
        quantise_rows 0 --head-dim $d --seq $n --no-rotation
      done
    done
    end ;;
  accuracy_08_fp8)
    begin h200_$part.csv "flashsteps accuracy --head-dim D (16 heads, N 4,096, 512 rows of O compared); paper: FlashAttention-3 (Shah et al. 2024), Table 3, whose N and head dim are not given" \
      "head_dim,dtype,how,rmse,relative"
    for d in 64 128 256; do
      "$flashsteps" accuracy --head-dim $d --format csv | tail -n +2 | awk -F, -v d=$d '{ print d "," $1 "," $2 "," $4 "," $5 }' >> "$file.part"
    done
    # FlashAttention-3, Table 3
    printf 'paper,%s,\n' fp16,unfused,3.2e-4 fp16,fused,1.9e-4 "e4m3,tensor scales,2.4e-2" "e4m3,tile scales and rotation,9.1e-3" \
      "e4m3,without tile scales,9.3e-3" "e4m3,without rotation,2.4e-2" >> "$file.part"
    end ;;
  peers_fp32) peers forward --dtype float32 --head-dims 64 --peers efficient math ;;
  peers_fp32_backward) peers backward --dtype float32 --head-dims 64 --peers efficient math ;;
  peers_bf16_07) peers forward --peers flash2 ;;
  peers_bf16) peers forward --sustained ;;
  peers_bf16_backward) peers backward --head-dims 64 128 ;;

  # Long runs. What they said stays in FOLDER.
  random) begin h200_long_$part.csv "flashsteps check STEP --random 2000 --seed 2030 --device gpu" "step,pass,dtype,cases,failed"
    steps=$(steps_like '^0[2-9]_')
    for step in $steps; do # all at once: most of it is the oracle's time
      ("$flashsteps" check $step --random 2000 --seed 2030 --device gpu > "$folder/random_${step//\//_}.txt" 2>&1 ||
        touch "$folder/random_failed") &
    done
    wait
    for step in $steps; do
      awk -v step="$step" '$1 == step && $4 ~ /^[0-9]+$/ { print $1 "," $2 "," $3 "," $4 "," $5; found = 1 }
        END { if (!found) print step ",,,,did not run" }' "$folder/random_${step//\//_}.txt" >> "$file.part"
    done
    [ ! -e "$folder/random_failed" ] || { found=1; rm "$folder/random_failed"; }
    end ;;
  soak) minutes=${SOAK_MINUTES:-5}
    begin h200_long_$part.csv "tests/soak $minutes 02 03 04 05 06 07 08" "kernels,rounds,launches,minutes,differed,device_grew_mb,host_grew_mb,result"
    "$(dirname "$flashsteps")/tests/soak" $minutes 02 03 04 05 06 07 08 > "$folder/soak.txt" 2>&1 || found=1
    tail -1 "$folder/soak.txt" |
      sed -nE 's/^([0-9]+) kernels, ([0-9]+) rounds, ([0-9]+) launches in ([0-9.]+) minutes; results that differed: ([0-9]+); memory grew by ([-0-9.]+) MB on the device, ([-0-9.]+) MB on the host .*: (\w+)$/\1,\2,\3,\4,\5,\6,\7,\8/p' >> "$file.part"
    end ;;
  big_*) begin h200_long_$part.csv "tests/long/big.sh build/flashsteps ${part#big_}" "exit_code,seconds,command"
    bash "$here/../../tests/long/big.sh" "$flashsteps" ${part#big_} > "$folder/$part.txt" 2>&1 || found=1
    sed -nE 's/^ok +([0-9]+) s +(check .*)$/0,\1,\2/p; s/^FAILED +([0-9]+) s +exit code ([0-9]+) +(check .*)$/\2,\1,\3/p' "$folder/$part.txt" >> "$file.part"
    end ;;
  esac
done
exit $found
