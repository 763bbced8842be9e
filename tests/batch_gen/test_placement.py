"""Where ranks run: a device each, and a compiler's patience where it is due."""

from types import SimpleNamespace

import pytest

from batch_gen.config import Mesh
from batch_gen.environment import cuda_devices
from batch_gen.errors import EnvironmentFault
from batch_gen.launch import COMPILE_S, EngineSpec
from batch_gen.patience import Patience
from batch_gen.placement import check_gpus, device_gpus, for_rehearsal


def cuda(replicas=2, device="cuda", **mesh):
    """Settings of a run on CUDA."""
    return SimpleNamespace(device=device, replicas=replicas, mesh=Mesh(**({"tp": 2} | mesh)))


def test_each_rank_of_each_replica_has_a_device():
    """Replica i of n ranks has devices i * n to i * n + n - 1, by the names under which they are visible here."""
    visible = ("3", "5", "GPU-a", "7")
    assert [device_gpus(cuda(), index, visible) for index in (0, 1)] == [("3", "5"), ("GPU-a", "7")]
    assert [device_gpus(cuda(), index, None) for index in (0, 1)] == [("0", "1"), ("2", "3")]
    assert device_gpus(cuda(device="cpu"), 1, visible) == ()


def test_too_few_devices_are_refused_with_the_count():
    """Fewer devices than ranks is exit 2 before the start; where the driver does not tell, the ranks find out."""
    check_gpus(cuda(), 2, ("0", "1", "2", "3"))
    check_gpus(cuda(), 2, None)
    check_gpus(cuda(device="cpu"), 2, ())
    with pytest.raises(EnvironmentFault, match=r"2 replicas of mesh .* need 4 devices.* shows 3 \(0, 1, 2\)") as caught:
        check_gpus(cuda(), 2, ("0", "1", "2"))
    assert caught.value.exit_code == 2


def test_devices_are_those_that_this_process_may_use(monkeypatch, tmp_path):
    """CUDA_VISIBLE_DEVICES decides, also an empty one; else the driver's files, which are numbered anew from 0."""
    for name in ("nvidia2", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda_devices(tmp_path) == ("0", "1")
    assert cuda_devices(tmp_path / "none") is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, MIG-1")
    assert cuda_devices(tmp_path) == ("4", "MIG-1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda_devices(tmp_path) == ()


def test_a_rehearsal_has_a_compilers_patience_throughout():
    """Also after a whole call of the kind has shown a quick pace: what comes next may be another graph of it."""
    spec = for_rehearsal(EngineSpec("fake", {}, "ranks", stall_s=5.0, first_s=0.0))
    patience = Patience(spec.stall_s, spec.min_stall_s, spec.first_s)
    for _ in range(4):
        patience.begin("denoise")
        assert patience.seconds == COMPILE_S
        patience.heard(works=True)
        assert patience.seconds == COMPILE_S
        patience.ended()
