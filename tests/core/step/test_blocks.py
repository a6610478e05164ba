"""Which parts of a model can run as one piece. `regions` is tested with the compiler's scope."""

from __future__ import annotations

from torch import nn

from plugins.core.step.blocks import pieces


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8)


def conv() -> list[nn.Module]:
    return [nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]


class Around(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def test_the_members_of_a_list_are_pieces_and_what_is_inside_them_is_not() -> None:
    model = Around(embed=nn.Embedding(9, 8), layers=nn.ModuleList(layer() for _ in range(3)), head=nn.Linear(8, 2))
    assert [piece.owner for piece in pieces(model)] == list(model.layers)


def test_members_that_are_lists_themselves_are_looked_into() -> None:
    stages = nn.Sequential(*(nn.Sequential(layer(), layer()) for _ in range(2)))
    assert [piece.owner for piece in pieces(stages)] == [child for stage in stages for child in stage]


def test_plain_layers_of_a_sequential_are_cut_before_each_layer_of_weights() -> None:
    model = nn.Sequential(nn.ReLU(), *conv(), nn.MaxPool2d(2), *conv(), nn.Conv2d(4, 4, 3))
    assert [(piece.start, len(piece.parts), piece.owner is model) for piece in pieces(model)] == [
        (1, 4, True),
        (5, 3, True),
    ]


def test_a_member_that_is_most_of_the_model_is_looked_into() -> None:
    backbone = Around(layers=nn.ModuleList(layer() for _ in range(4)))
    model = nn.Sequential(backbone, Around(a=nn.Linear(8, 8), b=nn.Tanh()))
    assert [piece.owner for piece in pieces(model)] == [*backbone.layers, model[1]]


def test_alike_attributes_are_pieces() -> None:
    model = Around(first=Around(a=nn.Linear(8, 8), b=nn.Tanh()), second=Around(a=nn.Linear(8, 8), b=nn.Tanh()))
    assert [piece.owner for piece in pieces(model)] == [model.first, model.second]


def test_a_block_whose_first_layer_changes_its_input_is_left_out() -> None:
    first, last = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
    blocks = [Around(act=first, conv=nn.Conv2d(4, 4, 3)), Around(conv=nn.Conv2d(4, 4, 3), act=last)]
    assert [piece.owner for piece in pieces(nn.ModuleList(blocks))] == [blocks[1]]
