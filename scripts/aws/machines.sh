#!/usr/bin/env bash
# The same command on a plain list of machines: machines.sh host1 host2 ...; each starts again while it exits 75.
set -u
for host in "$@"; do
  ssh "$host" 'code=75; while [ "$code" -eq 75 ]; do
    batch-gen run s3://BUCKET/manifest.parquet --out s3://BUCKET/run --model s3://BUCKET/wan2.2; code=$?
  done; exit "$code"' &
done
wait
