"""A user's script that touches every public name; type checkers read it, nobody runs it."""

from pathlib import Path
from typing import reveal_type

import torch
from torch import Tensor, nn

import gradsight

model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
Batch = tuple[Tensor, Tensor]
batch: Batch = (torch.randn(2, 4), torch.randn(2, 1))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return loss


def build() -> tuple[nn.Module, Batch]:
    return nn.Linear(4, 1), batch


def script() -> None:
    reveal_type(gradsight.__version__)

    # One run.
    schedule = gradsight.Schedule(step_interval=2)
    reveal_type(schedule.due(4))
    dumper = gradsight.GradientDumper("runs/first", save_first_n=10)
    reveal_type(dumper.dump(model, 0))
    with gradsight.watch(
        model, optimizer, run_dir="runs/first", sinks=["console"], stats=schedule, dump=dumper
    ) as watched:
        reveal_type(watched)
        watched.ids([1, "two"])
        watched.log(loss=batch[0].sum(), lr=0.1)
        watched.step(3, loss=0.5)
        watched.log_scalar("epoch", 1.0, 0)
        report = watched.report()
        reveal_type(report)
        reveal_type(report.findings)
        reveal_type(report.findings[0].code)
        reveal_type(report.to_markdown())
    dumper.wait()
    dumper.close()

    run = gradsight.open_run("runs/first")
    reveal_type(run)
    for step in run.steps():
        reveal_type(step.total_norm)
    for stat in run.parameter_stats():
        reveal_type(stat.l2)
    for finding in run.findings():
        reveal_type(finding.evidence)
    for score in run.scores():
        reveal_type(score.score)
    gradsight.read_scores("runs/first")  # a table of pyarrow's, which has no types of its own
    for histogram in run.histograms():
        reveal_type(histogram.bins())
    for incident in run.incidents():
        reveal_type(incident.code)

    # Distribution.
    tracker = gradsight.MetricsTracker("runs/first", use_tensorboard=True)
    tracker.log_scalar("loss", 0.5, 1)
    tracker.log_epoch(1, accuracy=0.5)
    reveal_type(gradsight.log_gradient_distribution(model, tracker, 1, log_histogram=True))
    reveal_type(gradsight._log_gradient_distribution(model, tracker, 1))
    reveal_type(tracker.use_wandb)
    tracker.close()

    # Health.
    reveal_type(gradsight.check_gradient_health(model, step=1).status)
    reveal_type(gradsight.preflight(model, batch, loss_fn).findings)

    # Dumps.
    metadata = gradsight.get_checkpoint_metadata(Path("runs/first/gradient_dumper/step0"))
    reveal_type(metadata.tensors)
    for tensor in gradsight.load_keys("runs/first/gradient_dumper/step0", ["weight"]):
        reveal_type(tensor)

    # Ghost.
    engine = gradsight.GhostEngine(model, loss_fn, batch, optimizer=optimizer)
    with engine.observe(sample_ids=[1, 2]):
        torch.autograd.backward(loss_fn(model, batch))
    reveal_type(engine.scores)
    reveal_type(engine.scores.total)
    reveal_type(engine.scores.by_target)
    reveal_type(engine.verify(batch).passed)
    engine.attach_train_batch(batch[0], batch[1], iteration=0, batch_idx=0)
    reveal_type(engine.prepare_forward_input(batch[0], batch[1]))
    sampler = gradsight.InfluenceSampler([1, 2, 3], floor=0.2)
    sampler.update(engine.scores)
    sampler.update(engine.scores.sample_ids, engine.scores.total)
    sampler.update([0, 1], [0.5, -0.5])
    reveal_type(sampler.weights)
    reveal_type(len(sampler))
    sampler.load_state_dict(sampler.state_dict())
    mixer = gradsight.DomainMixer(["news", "code"], seed=1)
    reveal_type(mixer.domain_weights)
    reveal_type(list(mixer))
    engine.close()

    # Memory.
    handle = gradsight.apply_checkpointing(model, "full")
    reveal_type(handle)
    handle.remove()
    use = gradsight.measure_peak_memory(lambda: torch.autograd.backward(loss_fn(model, batch)))
    reveal_type(use.peak_bytes)
    reveal_type(gradsight.predict_peak_memory(build).by_kind)
    reveal_type(gradsight.verify_checkpointing(build).reduction)
    plan = gradsight.plan_checkpointing(build, "6GB")
    reveal_type(plan.policy)
    monitor = gradsight.MemoryMonitor(log_every=10)
    reveal_type(monitor.sample(tracker, 1))

    # Trainers.
    reveal_type(gradsight.integrations.hf.GradsightCallback(ghost=True))
    reveal_type(gradsight.integrations.hf.register())
    reveal_type(gradsight.integrations.lightning.GradsightCallback("runs/first"))
    reveal_type(gradsight.integrations.accelerate.register())

    try:
        gradsight.open_run("nowhere")
    except gradsight.StopTraining as stopped:
        reveal_type(stopped.finding.code)
    except gradsight.GradsightError as error:
        reveal_type(error)
