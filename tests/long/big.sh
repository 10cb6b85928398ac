#!/usr/bin/env bash
# Sizes at the edge of what is allowed, each checked on a sample of rows on the GPU. On an H200 with 16 cores the groups
# take about two, five, six and two minutes, nearly all of it the host's. The last two have tensors of 2.3·10⁹ elements,
# up to 75 GB of the host's memory by `check`'s count. What it has no room for is refused, and counts as a failure here.
#
#     tests/long/big.sh build/flashsteps [WORDS]     only a group (grid, lengths, queries, keys), or the commands that
#                                                    have these words in them
set -u
flashsteps=$1
only=${2:-}
groups="grid lengths queries keys"
failed=0
ran=0

big() {  # limit in seconds, then arguments of `flashsteps check`
  local limit=$1 start=$SECONDS
  shift
  if [[ " $groups " == *" $only "* ]]; then
    [ "$only" = $group ] || return 0
  else
    [[ "$*" == *"$only"* ]] || return 0
  fi
  ran=$((ran + 1))
  local said
  said=$(timeout "$limit" "$flashsteps" check "$@" --device gpu 2>&1)
  local code=$?
  if [ $code -eq 0 ]; then
    echo "ok      $((SECONDS - start)) s  check $*"
  else
    failed=$((failed + 1))
    echo "FAILED  $((SECONDS - start)) s  exit code $code  check $*"
    echo "$said" | grep -E 'FAILED|flashsteps:|\[b ' | head -5 | cut -c 1-300
  fi
}

group=grid
# Batch and heads past 65,535, which is as far as the second and third axis of a grid go.
for size in "--batch 1 --heads 65536" "--batch 65536 --heads 1"; do
  big 60 02 03 04 05 06 $size --seq 5 --seq-k 9 --head-dim 32 --sample 300
  big 150 07 08 $size --seq 5 --seq-k 9 --head-dim 64 --sample 300 --causal
done
big 60 05 06 07 --heads 65536 --kv-heads 32768 --seq 5 --head-dim 64 --sample 300 --dropout 0.1

group=lengths
# Off a tile's end after many tiles; the first call counts.
big 60 02 03 04 05 06 --heads 24 --seq 4092 --head-dim 32 --sample 300
big 60 07 08 --heads 24 --seq 4092 --head-dim 64 --sample 300

# A million keys and queries.
big 60 05/register_tiled --pass forward --heads 1 --seq 1048576 --head-dim 64 --sample 40
big 60 07 08 --pass forward --heads 1 --seq 1048576 --head-dim 64 --sample 40 --dtype bf16
big 60 07 08 --pass forward --heads 1 --seq 1048576 --head-dim 64 --sample 40 --dtype bf16 --causal
big 150 06/register_tiled --pass backward --heads 1 --seq 65536 --head-dim 64 --sample 8
big 150 07 08 --pass backward --heads 1 --seq 65536 --head-dim 64 --sample 8 --dtype bf16

# Tensors of more than 2^31 elements: Q and O, then K and V. The host takes most of the time, so only one kernel of
# those that index alike.
many="--batch 16 --heads 128 --head-dim 64 --sample 300"
group=queries
big 300 02/forward 04/online 05/register_tiled --pass forward $many --seq 17477 --seq-k 3
big 300 07/pipelined 08/overlapped --pass forward $many --seq 17477 --seq-k 3 --dtype bf16
big 300 07/backward --pass backward $many --seq 17477 --seq-k 3 --dtype bf16
big 300 08/backward --pass backward $many --seq 17477 --seq-k 3 --dtype bf16
group=keys
big 300 05/register_tiled --pass forward $many --seq 3 --seq-k 17477
big 300 07/pipelined 08/overlapped --pass forward $many --seq 3 --seq-k 17477 --dtype bf16

if [ $ran -eq 0 ]; then
  echo "big.sh: no command has '$only' in it" >&2
  exit 2
fi
echo "$failed of $ran failed, $SECONDS s"
exit $((failed > 0))
