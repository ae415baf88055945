"""The callbacks that `gradsight run` puts into trainers, for scripts that have none themselves."""

from typing import Any

from gradsight.attach.session import told
from gradsight.core.open_watches import open_watch_of


def hf_callback() -> type:
    """A class that a Trainer of Hugging Face's makes one of; TRL's derive from it."""
    from gradsight.integrations.hf import GradsightCallback

    class AttachedCallback(GradsightCallback):
        """Opens when the first step begins: by then a callback of the script's own has opened."""

        def __init__(self) -> None:
            here = told()
            super().__init__(run_dir=here.run_dir, **here.options())
            self._begun = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._begun = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self._begun:
                self._begun = True
                if open_watch_of(kwargs["model"].parameters()) is None:
                    super().on_train_begin(args, state, control, **kwargs)
            super().on_step_begin(args, state, control, **kwargs)

    return AttachedCallback


def give_lightning_callback(trainer: Any) -> None:
    """Add the callback to a Trainer of Lightning's; the script's own callbacks come before it."""
    from gradsight.integrations.lightning import GradsightCallback

    class AttachedCallback(GradsightCallback):
        """Opens unless a callback of the script's own has."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if open_watch_of(pl_module.parameters()) is None:
                super().on_train_start(trainer, pl_module)

    here = told()
    trainer.callbacks.append(AttachedCallback(run_dir=here.run_dir, **here.options()))
