"""Solvers are diffusers' own with an explicit shift; the shift decides how many steps each expert does."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from models.errors import ModelError
from models.wan.solver import initial_noise, make_solver

UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}


@pytest.mark.parametrize(
    ("shift", "boundary", "high"), [(12, 875, 26), (5, 875, 17), (3, 875, 13), (5, 900, 15), (3, 900, 11)]
)
def test_shift_moves_the_split(shift, boundary, high):
    """At 40 steps the number of high-noise steps is the published one for each shift."""
    timesteps = make_solver(UNIPC, "unipc", shift, 40).timesteps
    assert sum(timestep >= boundary for timestep in timesteps) == high


def test_unipc_is_diffusers_own():
    """Every step is bit for bit that of diffusers' scheduler from the same config."""
    theirs = UniPCMultistepScheduler.from_config(UNIPC, flow_shift=5.0)
    theirs.set_timesteps(6)
    ours = make_solver(UNIPC, "unipc", 5.0, 6)
    mine = reference = initial_noise(1, (4, 2, 3, 3))
    for step, timestep in enumerate(theirs.timesteps):
        velocity = initial_noise(100 + step, (4, 2, 3, 3))
        mine = ours.step(step, velocity, mine)
        reference = theirs.step(velocity, timestep, reference, return_dict=False)[0]
        assert torch.equal(mine, reference)


def test_euler_is_diffusers_own():
    """The Euler schedule has the checkpoint's training timesteps and the clip's shift."""
    theirs = FlowMatchEulerDiscreteScheduler(1000, shift=7.0)
    theirs.set_timesteps(5)
    assert make_solver(UNIPC, "euler", 7.0, 5).timesteps == theirs.timesteps.tolist()


def test_a_config_of_the_other_class_serves():
    """A checkpoint whose scheduler is Euler can be run with UniPC, as flow matching."""
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
    assert make_solver(config, "unipc", 5.0, 8).timesteps == make_solver(UNIPC, "unipc", 5.0, 8).timesteps


def test_entering_in_the_middle_starts_at_order_one():
    """From step 3 on, without history, the first step is the uncorrected first-order one: x + (sigma' - sigma) v."""
    solver = make_solver(UNIPC, "unipc", 5.0, 8, start=3)
    theirs = UniPCMultistepScheduler.from_config(UNIPC, flow_shift=5.0)
    theirs.set_timesteps(8)
    latents, velocity = initial_noise(1, (4, 2, 3, 3)), initial_noise(2, (4, 2, 3, 3))
    sigma, after = theirs.sigmas[3], theirs.sigmas[4]
    torch.testing.assert_close(solver.step(3, velocity, latents), latents + (after - sigma) * velocity)


@pytest.mark.parametrize(("config", "name"), [(UNIPC, "heun"), (UNIPC | {"use_dynamic_shifting": True}, "unipc")])
def test_what_cannot_be_solved_is_refused(config, name):
    """An unknown solver, or a config that computes its own shift, is unsupported."""
    with pytest.raises(ModelError) as caught:
        make_solver(config, name, 5.0, 4)
    assert caught.value.kind == "unsupported"


def test_noise_depends_on_the_seed_alone():
    """Equal seeds give equal noise whatever torch's global generator does; the largest seed works."""
    torch.manual_seed(1)
    first = initial_noise(2**32 - 1, (4, 2, 3, 3))
    torch.manual_seed(2)
    assert torch.equal(initial_noise(2**32 - 1, (4, 2, 3, 3)), first)
    assert not torch.equal(initial_noise(0, (4, 2, 3, 3)), first)
