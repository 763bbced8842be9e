"""The memory that conv3d uses again serves calls inside and outside of inference mode."""

import threading

import torch

from kernels.conv3d import conv3d


def test_inference_mode_leaves_nothing_behind():
    """A call in inference mode, then one without gradients: both work and give the same numbers."""
    x = torch.randn(1, 8, 3, 6, 5)
    weight, bias, gain = torch.randn(4, 8, 3, 3, 3), torch.randn(4), torch.rand(8)
    results = []

    def call():
        for mode in (torch.inference_mode(), torch.no_grad()):
            with mode:
                results.append(conv3d(x, weight, bias, (1, 1), gain, True).clone())

    thread = threading.Thread(target=call)  # a thread of its own begins without any memory to use again
    thread.start()
    thread.join()
    assert len(results) == 2
    assert torch.equal(results[0], results[1])
