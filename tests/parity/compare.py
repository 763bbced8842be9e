"""Our pipeline against a reference: figures, bounds and a verdict."""

from dataclasses import dataclass, field

from models.events import DoneEvent, TapEvent

VELOCITY_BOUND = 1e-5
TRAJECTORY_BOUND = 1e-4
OWN_ERROR_FACTOR = 10.0


def relative(value, reference):
    """Relative L2 distance, computed in float64."""
    value, reference = value.double().flatten(), reference.double().flatten()
    return float((value - reference).norm() / reference.norm())


def our_velocity(pipeline, clip, step, latents):
    """Our guided velocity [C, T, h, w] at a step that is entered with given latents [1, C, T, h, w]."""
    name = f"velocity.{step}"
    events = pipeline.denoise(clip, start=(step, latents[0].float()), stop=step + 1, taps=frozenset({name}))
    return next(event.value for event in events if isinstance(event, TapEvent) and event.name == name)


def our_latents(pipeline, clip):
    """Our final latents [C, T, h, w]."""
    return next(event.latents for event in pipeline.denoise(clip) if isinstance(event, DoneEvent))


@dataclass
class Verdict:
    """What was measured: relative L2 per named step, of the trajectory, and of both sides against float64."""

    velocity: dict = field(default_factory=dict)
    trajectory: float = 0.0
    own_error: float = 0.0
    their_error: float = 0.0

    @property
    def faults(self):
        """Every bound that is broken, in words."""
        found = [
            f"velocity at the {name} step: {error:.1e}"
            for name, error in self.velocity.items()
            if not error <= VELOCITY_BOUND
        ]
        if not self.trajectory <= TRAJECTORY_BOUND:
            found.append(f"trajectory: {self.trajectory:.1e}")
        if not self.own_error <= OWN_ERROR_FACTOR * self.their_error:
            found.append(f"error against float64: {self.own_error:.1e}, diffusers' own is {self.their_error:.1e}")
        return found


def judge(pipeline, clip, trace, exact):
    """Compare with a float32 trace of diffusers at the named steps, teacher-forced, and over the whole trajectory.

    exact: the trace of the same clip in float64.
    """
    steps = trace.named_steps()
    velocity = {
        name: relative(our_velocity(pipeline, clip, step, trace.latents[step]), trace.velocities[step][0])
        for name, step in steps.items()
    }
    final = our_latents(pipeline, clip)
    return Verdict(
        velocity, relative(final, trace.final), relative(final, exact.final), relative(trace.final, exact.final)
    )


def summary(verdict):
    """One line of figures."""
    worst = max(verdict.velocity.values())
    ratio = verdict.own_error / verdict.their_error
    return f"velocity {worst:.1e}, trajectory {verdict.trajectory:.1e}, error against float64 {ratio:.2f} x diffusers'"
