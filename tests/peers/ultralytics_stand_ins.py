"""Stands in for what Ultralytics' tests download: drawn data sets of 4 + 4 pictures, models with random weights.

    python tests/peers/ultralytics_stand_ins.py FOLDER

`ultralytics_engine.py` runs it before each of its two runs, whose settings are FOLDER's (`YOLO_CONFIG_DIR`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image

# Data set of the host's own yaml -> (its kind of labels, its classes).
LABELLED = {"coco8": ("detect", 80), "coco8-seg": ("polygon", 80), "coco8-pose": ("pose", 1), "dota8": ("polygon", 15)}
MASKS = {"cityscapes8": ("masks", 19, np.uint8), "depth8-png": ("depth", 9000, np.uint16)}
MODELS = ("n", "n-seg", "n-cls", "n-pose", "n-obb", "n-sem", "n-depth", "s")
WIDTH, HEIGHT = 96, 64
RANDOM = np.random.default_rng(0)


def make(folder: Path) -> None:
    """Settings, data sets and weights, below `folder`."""
    settings = folder / "Ultralytics"
    settings.mkdir(parents=True, exist_ok=True)
    os.environ["YOLO_CONFIG_DIR"], os.environ["YOLO_OFFLINE"] = str(folder), "true"
    from ultralytics import YOLO  # it reads the variables as it is imported
    from ultralytics import settings as host

    data, weights = folder / "datasets", folder / "weights"
    host.update({"datasets_dir": str(data), "weights_dir": str(weights), "runs_dir": str(folder / "runs")})
    for part in ("train", "val", "test"):
        for number in range(4):
            for name, (kind, classes) in LABELLED.items():
                picture(data / name / "images" / part / f"{number}.jpg")
                write(data / name / "labels" / part / f"{number}.txt", label(kind, classes))
            for name, (beside, highest, of) in MASKS.items():
                picture(data / name / "images" / part / f"{number}.png")
                mask = RANDOM.integers(0, highest, (HEIGHT, WIDTH), dtype=of)
                save(data / name / beside / part / f"{number}.png", mask)
        for number in range(10):
            picture(data / "imagenet10" / part / f"class{number}" / "0.jpg")
    for name in MODELS:
        YOLO(f"yolo26{name}.yaml").save(str(place(weights / f"yolo26{name}.pt")))
    YOLO("yolo26n.yaml").save(str(place(weights / "path with spaces" / "yolo26n.pt")))


def place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def save(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(place(path))


def picture(path: Path) -> None:
    save(path, RANDOM.integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8))


def write(path: Path, text: str) -> None:
    place(path).write_text(text, encoding="utf-8")


def label(kind: str, classes: int) -> str:
    """Four objects of a picture: a class, then a box, its corners, or the box and 17 points."""
    lines = []
    for _ in range(4):
        (x, y), (w, h) = RANDOM.uniform(0.3, 0.7, 2), RANDOM.uniform(0.1, 0.4, 2)
        left, right, top, bottom = x - w / 2, x + w / 2, y - h / 2, y + h / 2
        corners = [left, top, right, top, right, bottom, left, bottom]
        points = [value for _ in range(17) for value in (*RANDOM.uniform(0.3, 0.7, 2), 2)]
        values = {"detect": [x, y, w, h], "polygon": corners, "pose": [x, y, w, h, *points]}[kind]
        lines.append(" ".join([str(RANDOM.integers(classes)), *(f"{value:.5f}" for value in values)]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
