"""The plain loop with something of a library in it: LoRA, Fabric, Accelerate."""

from typing import Any

import peft
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn

from gradsight.integrations import accelerate as accelerate_door
from matrix.nets import LIMIT
from matrix.settings import Loop


class LoRA(Loop):
    def changed(self, net: nn.Module) -> nn.Module:
        config = peft.LoraConfig(
            r=2, target_modules=["up", "down"], init_lora_weights=False, modules_to_save=["head"]
        )
        return peft.get_peft_model(net, config)  # type: ignore[arg-type, return-value]


class InFabric(Loop):
    def wrapped(self, net: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        self.fabric = Fabric(accelerator="cpu", devices=1)
        return self.fabric.setup(net, optimizer)  # type: ignore[return-value]

    def backward(self, model: Any, loss: Tensor, part: int) -> None:
        self.fabric.backward(loss)

    def update(self, model: Any, optimizer: Any) -> None:
        self.fabric.clip_gradients(model, optimizer, max_norm=LIMIT, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()


class InAccelerate(Loop):
    def wrapped(self, net: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        self.accelerator = Accelerator(cpu=True)
        return self.accelerator.prepare(net, optimizer)  # type: ignore[no-any-return]

    def opened(self, model: Any, optimizer: Any, options: dict[str, Any]) -> Any:
        return accelerate_door.watch(self.accelerator, model, optimizer, **options)

    def backward(self, model: Any, loss: Tensor, part: int) -> None:
        self.accelerator.backward(loss)

    def update(self, model: Any, optimizer: Any) -> None:
        self.accelerator.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()


LIBRARIES: dict[str, Loop] = {
    "LoRA": LoRA(),
    "Fabric": InFabric(),
    "Accelerate": InAccelerate(),
}
