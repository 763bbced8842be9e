#!/usr/bin/env bash
# The same command as a Slurm array: SLURM_ARRAY_TASK_ID is read, exit 75 requeues the task.
#SBATCH --job-name=batch-gen
#SBATCH --array=0-7
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
set -u
batch-gen run s3://BUCKET/manifest.parquet --out s3://BUCKET/run --model s3://BUCKET/wan2.2 &
worker=$!
trap 'kill -TERM "$worker"; wait "$worker"' TERM
wait "$worker"
code=$?
if [ "$code" -eq 75 ]; then scontrol requeue "${SLURM_JOB_ID}"; fi
exit "$code"
