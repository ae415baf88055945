"""The simulated device is as strict as it says: else nothing that runs on it is proven."""

import pytest
import torch
from torch import nn

from device.clock import BrokenCapture
from device.simulated import capturing, simulated
from device.tensors import moved, peek, replay


def test_numbers_arrive_when_an_event_behind_them_has_passed() -> None:
    with simulated() as there:
        host = torch.empty(2, pin_memory=True)
        host.copy_(torch.ones(2, device=there.device), non_blocking=True)
        event = torch.Event(there.device)
        event.record(torch.accelerator.current_stream(there.device))
        assert host.isnan().all()
        assert not event.query()
        event.synchronize()
        assert host.tolist() == [1, 1]
        assert event.query()


@pytest.mark.parametrize(("speed", "passed"), [("slow", False), ("fast", True), (3, False)])
def test_how_far_it_lags_behind(speed: object, passed: bool) -> None:
    with simulated(speed) as there:  # type: ignore[arg-type]
        event = torch.Event(there.device)
        values = torch.ones(2, device=there.device) + 1
        event.record(torch.accelerator.current_stream(there.device))
        assert event.query() is passed
        for _ in range(3):
            values = values + 1
        assert event.query() is (speed != "slow")


def test_every_way_to_wait_is_counted() -> None:
    with simulated() as there:
        values = torch.arange(3.0, device=there.device)
        waits = {
            "item": lambda: values[0].item(),
            "bool": lambda: bool(values.any()),
            "tolist": values.tolist,
            "equal": lambda: torch.equal(values, values),
            "nonzero": values.nonzero,
            "mask": lambda: values[values > 1],
            "to the host": values.cpu,
            "to pageable memory": lambda: torch.empty(3).copy_(values, non_blocking=True),
            "from the host": lambda: torch.tensor([1.0], device=there.device),
            "synchronize": torch.accelerator.synchronize,
        }
        for name, wait in waits.items():
            there.clock.waits.clear()
            wait()
            assert [each.drains for each in there.clock.waits] == [True], name
        there.clock.waits.clear()
        pinned = torch.ones(3).pin_memory()
        values + pinned.to(there.device, non_blocking=True)
        assert there.clock.waits == []


def test_host_and_device_do_not_mix() -> None:
    with simulated() as there, pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=there.device) + torch.ones(2)


def test_an_event_without_a_stream_is_the_current_devices() -> None:
    with simulated(kind="cuda:1") as there:
        values = torch.ones(2, device=there.device)
        assert values.device == torch.device("cuda:1")
        assert values.is_cuda
        careless = torch.Event(there.device)
        careless.record()
        assert careless.query()
        event = torch.Event(there.device)
        event.record(torch.accelerator.current_stream(there.device))
        assert not event.query()
        torch.cuda.synchronize()  # of the current device, which has nothing to do
        assert not event.query()


def test_its_generators_are_its_own() -> None:
    with simulated(kind="cuda:1") as there:
        hosts = torch.get_rng_state()
        others = torch.cuda.get_rng_state()
        before = torch.cuda.get_rng_state(there.device)
        first = peek(torch.rand(3, device=there.device))
        assert torch.equal(hosts, torch.get_rng_state())
        assert torch.equal(others, torch.cuda.get_rng_state())
        torch.cuda.set_rng_state(before, there.device)
        assert torch.equal(first, peek(torch.rand(3, device=there.device)))


def test_it_can_lack_float64() -> None:
    with simulated(float64=False) as there:
        values = torch.ones(2, device=there.device)
        with pytest.raises(TypeError, match="float64"):
            values.double()


def test_autocast_has_kernels_for_it() -> None:
    with simulated() as there:
        layer = moved(nn.Linear(3, 2), there.device)
        with torch.autocast(there.type, dtype=torch.bfloat16):
            out = layer(torch.ones(4, 3, device=there.device))
        assert out.dtype is torch.bfloat16
        out.float().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype is torch.float32


def test_a_capture_forbids_waits_and_a_replay_runs_what_was_kept() -> None:
    with simulated() as there:
        static = torch.zeros(2, device=there.device)
        with capturing() as graph:
            out = static * 2 + 1
            with pytest.raises(BrokenCapture):
                out[0].item()
            with pytest.raises(BrokenCapture):
                torch.empty(2, pin_memory=True)
        static.fill_(3)
        replay(graph)
        assert peek(out).tolist() == [7, 7]
