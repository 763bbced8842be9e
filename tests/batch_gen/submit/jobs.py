"""Jobs of moto's Batch, which runs nothing, in whatever state a test wants."""

REGION = "us-east-2"


def put_job(job_id, status, *attempts, reason=None):
    """Put a job of moto's Batch, which runs nothing, into a state: its status, and (exit code, reason) of attempts."""
    from moto.batch.models import batch_backends

    job = batch_backends["123456789012"][REGION]._jobs[job_id]
    job.status = status
    job.job_stopped_reason = reason
    job.exit_code = None
    stopped_ms = int(job.job_created_at.timestamp() * 1000) + 60_000
    job.attempts = [
        {"container": {"exitCode": code, "reason": why}, "statusReason": "", "stoppedAt": stopped_ms}
        for code, why in attempts
    ]


def job_id_of(text):
    """The id that `submit` printed."""
    return next(line for line in text.splitlines() if line.startswith("job ")).split()[1]
