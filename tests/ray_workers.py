"""What two workers of Ray Train run: a Trainer with the callback, and a loop with `Accelerated`, as anywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

PARTS = ([3, 1], [2, 4])
"""Samples of each worker's micro-batches, two an update."""


def head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 3)


def rows(worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(worker)
    count = sum(PARTS[worker])
    return torch.randn(count, 8, generator=draw), torch.randint(0, 3, (count,), generator=draw)


def loop(config: dict[str, Any]) -> None:
    """One update of a hand-written loop."""
    from plugins.loop import Accelerated

    rank, model = dist.get_rank(), head()
    accel = Accelerated(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2, memory_format="host", say=lambda line: None
    )
    for batch in accel.batches(list(zip(*(t.split(PARTS[rank]) for t in rows(rank)), strict=True))):
        accel.training_step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), batch)
    torch.save({"model": model.state_dict(), "updates": accel.updates}, Path(config["folder"]) / f"loop{rank}.pt")
    accel.end()


def trainer(config: dict[str, Any]) -> None:
    """One update of a Trainer, of six unequal micro-batches of one sample."""
    from tests.huggingface.runs import report, trainer_for

    folder = Path(config["folder"]) / "trainer"
    made, spy = trainer_for(
        "bert-token", folder, 6, per_device_train_batch_size=1, gradient_accumulation_steps=3, max_steps=1
    )
    made.train()
    dist.barrier()
    found = {"gradients": spy.gradients[0], "report": report(folder)["window"]}
    torch.save(found, Path(config["folder"]) / f"trainer{dist.get_rank()}.pt")


def both(config: dict[str, Any]) -> None:
    """One start of Ray's for both: it takes many seconds."""
    loop(config)
    trainer(config)


def main(folder: str) -> None:
    """The driver: Ray on this machine, two workers on the CPU."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        TorchTrainer(
            both,
            train_loop_config={"folder": folder},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            torch_config=TorchConfig(backend="gloo", timeout_s=60),
            run_config=RunConfig(name="run", storage_path=str(Path(folder) / "ray")),
        ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    import sys

    from tests.ray_workers import main as imported  # by name, so that workers find it

    imported(sys.argv[1])
