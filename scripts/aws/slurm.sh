#!/usr/bin/env bash
# The same command as a Slurm array: SLURM_ARRAY_TASK_ID is read. Exit 75 (drained) and 137 (killed) requeue the task;
# SLURM_RESTART_COUNT tells the next start that there was one before.
#SBATCH --job-name=batch-gen
#SBATCH --array=0-7
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
set -u
MAX_RESTARTS=10
worker="" asked=""
trap 'asked=yes; [ -n "$worker" ] && kill -TERM "$worker" 2>/dev/null' TERM
batch-gen run s3://BUCKET/manifest.parquet --out s3://BUCKET/run --model s3://BUCKET/wan2.2 &
worker=$!
[ -n "$asked" ] && kill -TERM "$worker" # it came before there was anybody to tell
wait "$worker"
code=$?
while kill -0 "$worker" 2>/dev/null; do # a trap interrupts wait; the worker's own code comes only with its end
  wait "$worker"
  code=$?
done
if [ "$code" -eq 75 ] || [ "$code" -eq 137 ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
  fi
fi
exit "$code"
