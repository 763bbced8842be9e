#!/usr/bin/env bash
# The same command on a plain list of machines: machines.sh host1 host2 ...
# Each machine starts again after 75 (drained) and 137 (killed), ten times at most; the loop ends with the worst code.
set -u
pids=()
for host in "$@"; do
  ssh "$host" 'code=75; starts=0
  while { [ "$code" -eq 75 ] || [ "$code" -eq 137 ]; } && [ "$starts" -lt 10 ]; do
    starts=$((starts + 1))
    batch-gen run s3://BUCKET/manifest.parquet --out s3://BUCKET/run --model s3://BUCKET/wan2.2
    code=$?
  done
  exit "$code"' &
  pids+=("$!")
done
worst=0
for pid in "${pids[@]}"; do
  wait "$pid"
  code=$?
  [ "$code" -gt "$worst" ] && worst=$code
done
exit "$worst"
