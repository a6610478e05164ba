"""A planned loop with a clock of its own: every plan takes the seconds that a test gives it."""

from __future__ import annotations

from functools import partial
from numbers import Real

import torch
from torch.utils.data import DataLoader, TensorDataset

from plugins.core.plan import Plan
from plugins.loop import Accelerated
from tests.core.planned import BOTH_WIN, Net, by_name

OF = 1000  # micro-batches that a run is said to have


class Loop:
    """A run of a net with BatchNorm and dropout, over a shuffled loader; a step takes as long as `seconds` says."""

    def __init__(self, clock, seconds=BOTH_WIN, planned=True, model=Net, shape=(3, 8, 8), left=OF, **options):
        torch.manual_seed(0)
        self.clock, self.costs, self.losses = clock, by_name(**seconds), 0
        draw = torch.Generator().manual_seed(5)
        images, labels = torch.rand(28, *shape, generator=draw), torch.randint(2, (28,), generator=draw)
        self.loader = DataLoader(TensorDataset(images, labels), 4, shuffle=True)  # its order is of the run's own draws
        self.model = model()
        self.done, self.left, self.given = 0, left, self.loss
        settings = {"precision": "auto", "compile": "off", "ema": 0.9, **options}
        self.accel = Accelerated(
            self.model,
            torch.optim.AdamW(self.model.parameters(), lr=0.01),
            planned=planned,
            say=lambda line: None,
            **settings,
        )

    def loss(self, images, labels):
        self.losses += 1
        layout, compiled = self.accel.layout, self.accel.session.compilation.active
        scope = "regional" if compiled else "eager"
        self.clock.now += self.costs(Plan(layout.precision, layout.memory_format, scope))
        return torch.nn.functional.cross_entropy(self.model(self.accel.moved(images)), labels)

    def run(self, epochs=2):
        """`epochs` of seven micro-batches."""
        self.accel.train()
        for _ in range(epochs):
            for batch in self.loader:
                self.step(*batch)
        return self

    def step(self, images, labels):
        left = self.left - self.done if isinstance(self.left, Real) else self.left
        self.accel.plan(partial(self.given, images, labels), left, images.shape)
        with self.accel.forward(images):
            loss = self.loss(images, labels)
        self.accel.backward(loss, weight=len(images))
        self.done += 1

    @property
    def tuner(self):
        return self.accel.session.tuner

    def state(self):
        return self.accel.session.state_dict() | {"plan": None, "config": None, "switches": None}
