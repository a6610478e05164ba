"""The training loader's position: a fresh loader, put where an old one stood, draws what that would have drawn."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, WeightedRandomSampler
from ultralytics.data.build import InfiniteDataLoader

from integrations.ultralytics import data as position_of


class Images(Dataset[int]):
    """Says which images it was asked for; keeps the last few, as the host does for mosaics."""

    def __init__(self, count: int) -> None:
        self.count, self.buffer = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.load_image(index)
        return index

    def load_image(self, index: int) -> None:
        if index not in self.buffer:
            self.buffer.append(index)
            if len(self.buffer) >= 5:
                self.buffer.pop(0)


def fresh(count: int, workers: int = 0) -> Any:
    generator = torch.Generator()
    generator.manual_seed(7)
    return InfiniteDataLoader(Images(count), batch_size=4, shuffle=True, generator=generator, num_workers=workers)


def with_a_sampler(count: int, own: bool) -> Any:
    """An infinite loader of a user's: a sampler that draws from a generator of its own, or from torch's."""
    generator = torch.Generator().manual_seed(7) if own else None
    sampler = WeightedRandomSampler([1.0] * count, count, generator=generator)
    return InfiniteDataLoader(Images(count), batch_size=4, sampler=sampler, num_workers=0)


def epoch(loader: Any) -> list[int]:
    return [int(i) for batch in loader for i in batch]


def stored(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return dict(torch.load(buffer, weights_only=True))


@pytest.mark.parametrize("count", [12, 13, 4, 3, 1])
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize("closes", [None, 1, 2, 3])
def test_a_restored_loader_goes_on_as_the_old_one(count: int, cut: int, closes: int | None) -> None:
    """`closes` is the epoch that closes the mosaic, and resets the loader; a resumed host resets it in any case."""
    straight, seen, state = fresh(count), list[list[int]](), {}
    for number in range(5):
        if number == cut:
            state = stored(position_of.position(straight))
        if number == closes:
            straight.reset()
        seen.append(epoch(straight))
    resumed = fresh(count)
    closed = closes is not None and closes < cut
    position_of.restore(resumed, state, closed)
    assert resumed.dataset.buffer == state["buffer"]
    for number in range(cut, 5):
        if number == closes or (number == cut and closed):
            resumed.reset()
        assert epoch(resumed) == seen[number]
    assert resumed.dataset.buffer == straight.dataset.buffer
    assert "reset" not in vars(resumed)
    assert "_get_iterator" not in vars(resumed)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("count", [12, 13])
@pytest.mark.parametrize("closes", [None, 0, 2])
def test_an_infinite_loader_with_a_sampler_of_the_user_s_goes_on(own: bool, count: int, closes: int | None) -> None:
    torch.manual_seed(3)
    straight, seen = with_a_sampler(count, own), list[list[int]]()
    for number in range(4):
        if number == 2:
            state, drawn = stored(position_of.position(straight)), torch.get_rng_state()
        if number == closes:
            straight.reset()
        seen.append(epoch(straight))
    resumed = with_a_sampler(count, own)
    position_of.restore(resumed, state, closes == 0)
    torch.set_rng_state(drawn)
    if closes is not None:
        resumed.reset()
    assert [epoch(resumed), epoch(resumed)] == seen[2:]


def test_a_loader_with_workers_is_left_alone() -> None:
    loader = fresh(8, workers=1)
    position_of.restore(loader, position_of.position(fresh(8)), False)
    assert "reset" not in vars(loader)


def test_a_dataset_without_a_mosaic_buffer() -> None:
    loader = fresh(8)
    del loader.dataset.buffer
    state = position_of.position(loader)
    assert state["buffer"] == []
    position_of.restore(loader, state, False)


def test_a_data_set_of_another_size_begins_anew() -> None:
    data = [torch.zeros(1)] * 6
    kept = position_of.position(SimpleNamespace(dataset=data, generator=torch.Generator()))
    other = SimpleNamespace(dataset=data[:4], generator=torch.Generator(), num_workers=0)
    assert position_of.restore(other, kept, mosaic_closed=False) is False
