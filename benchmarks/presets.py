"""What the table of `plugins/find_batch/presets.py` is made of, counted from the models themselves; no memory is taken.

python benchmarks/presets.py

A model is built and run forward on fake tensors, and the bytes that autograd keeps for its backward are counted, each
storage once: what a sample adds, and with the number of parameters all that the forecast needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends import mkldnn

MIB = 2**20
Counted = tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Any]]
FEW, MORE = 2, 6  # samples: the difference is what a sample adds


def detector(name: str, size: int = 640) -> Counted:
    """YOLO, from its description; [N, 3, size, size] px."""
    from ultralytics.nn.tasks import DetectionModel

    def build() -> nn.Module:
        return DetectionModel(f"{name}.yaml", verbose=False)

    return build, lambda model, count: model(torch.rand(count, 3, size, size))


def recognizer(width: int = 600) -> Counted:
    """EasyOCR's VGG, BiLSTM, CTC with 97 classes; [N, 1, 64, width] px."""
    from easyocr.model.vgg_model import Model

    return lambda: Model(1, 256, 256, 97), lambda model, count: model(torch.rand(count, 1, 64, width), None)


def encoder(layers: int, hidden: int, tokens: int) -> Counted:
    """BERT with a classification head; [N, tokens]."""
    from transformers import BertConfig, BertForSequenceClassification

    def build() -> nn.Module:
        sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden}
        return BertForSequenceClassification(
            BertConfig(num_attention_heads=hidden // 64 if hidden > 400 else 12, **sizes)
        )

    def forward(model: nn.Module, count: int) -> Any:
        shape = (count, tokens)
        return model(input_ids=torch.ones(shape, dtype=torch.long), attention_mask=torch.ones(shape, dtype=torch.long))

    return build, forward


MODELS = {
    "YOLOv8n, 640 px": lambda: detector("yolov8n"),
    "YOLOv8s, 640 px": lambda: detector("yolov8s"),
    "YOLOv8m, 640 px": lambda: detector("yolov8m"),
    "EasyOCR VGG-BiLSTM, 64 x 600 px": lambda: recognizer(),
    "MiniLM-L6, 256 tokens": lambda: encoder(6, 384, 256),
    "BERT-base, 256 tokens": lambda: encoder(12, 768, 256),
    "BERT-base, 512 tokens": lambda: encoder(12, 768, 512),
}


@contextlib.contextmanager
def kept(parameters: set[int]) -> Iterator[dict[int, int]]:
    """Inside, what autograd keeps: storage -> bytes, without the parameters themselves."""
    found: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            found[storage._cdata] = storage.nbytes()
            alive.append(tensor)  # so that no other storage gets this address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def count(name: str) -> tuple[int, float, float]:
    """(parameters, MiB that each sample keeps in fp32, the same under bf16 autocast)."""
    build, forward = MODELS[name]()
    model = build().train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            table.update({key: fake.from_tensor(one) for key, one in table.items() if one is not None})
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def held(samples: int, half: bool) -> int:
        # in bf16 oneDNN has an LSTM on some machines only; without it more is kept
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
        with fake, autocast, mkldnn.flags(enabled=not half), kept(weights) as found:
            forward(model, samples)
        return sum(found.values())

    full, half = ((held(MORE, half) - held(FEW, half)) / (MORE - FEW) / MIB for half in (False, True))
    return parameters, full, half


def main() -> None:
    for name in MODELS:
        parameters, full, half = count(name)
        print(f"{name:34} {parameters:>12,} parameters, MiB a sample: fp32 {full:7.1f}, bf16 {half:7.1f}")


if __name__ == "__main__":
    main()
