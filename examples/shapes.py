"""A small labelled data set of drawn shapes: three classes, train and val, the same for a seed on any machine.

python examples/shapes.py demo/shapes            # 400 + 100 images of 160 px, YOLO detection labels
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle")


def draw(generator: random.Random, size: int, most: int = 3) -> tuple[Image.Image, list[tuple[int, list[float]]]]:
    """One image of `size` px and its objects: (class, [x, y, w, h] as fractions of the image)."""
    background = tuple(generator.randint(0, 110) for _ in range(3))
    image = Image.new("RGB", (size, size), background)
    pen, objects = ImageDraw.Draw(image), []
    for _ in range(generator.randint(1, most)):
        kind, radius = generator.randrange(3), generator.uniform(0.08, 0.2) * size
        x, y = (generator.uniform(radius, size - radius) for _ in range(2))
        colour = tuple(generator.randint(130, 255) for _ in range(3))
        box = [x - radius, y - radius, x + radius, y + radius]
        if kind == 0:
            pen.ellipse(box, fill=colour)
        elif kind == 1:
            pen.rectangle(box, fill=colour)
        else:
            pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
        objects.append((kind, [x / size, y / size, 2 * radius / size, 2 * radius / size]))
    return image, objects


def label(kind: int, box: list[float], task: str) -> str:
    """One line of a YOLO label file for `detect`, `segment`, `obb` or `pose` (one key point, the centre)."""
    x, y, w, h = box
    corners = [x - w / 2, y - h / 2, x + w / 2, y - h / 2, x + w / 2, y + h / 2, x - w / 2, y + h / 2]
    numbers = {
        "detect": box,
        "segment": corners,
        "obb": corners,
        "pose": [*box, x, y, 2],
    }[task]
    return " ".join([str(kind), *(f"{n:.6f}" for n in numbers)])


def write(folder: Path, train: int = 400, val: int = 100, size: int = 160, seed: int = 0, task: str = "detect") -> Path:
    """Write the data set; returns the path of its `data.yaml` (for `classify`, of the folder itself)."""
    generator = random.Random(seed)
    for split, count in (("train", train), ("val", val)):
        for index in range(count):
            if task == "classify":
                kind = index % 3
                image = draw_one(generator, size, kind)
                target = folder / split / CLASSES[kind] / f"{index:04}.png"
                target.parent.mkdir(parents=True, exist_ok=True)
                image.save(target)
                continue
            image, objects = draw(generator, size)
            for kind in ("images", "labels"):
                (folder / kind / split).mkdir(parents=True, exist_ok=True)
            image.save(folder / "images" / split / f"{index:04}.png")
            lines = "\n".join(label(kind, box, task) for kind, box in objects)
            (folder / "labels" / split / f"{index:04}.txt").write_text(lines + "\n", encoding="utf-8")
    if task == "classify":
        return folder
    names = "\n".join(f"  {i}: {name}" for i, name in enumerate(CLASSES))
    extra = "kpt_shape: [1, 3]\n" if task == "pose" else ""
    data = folder / "data.yaml"
    data.write_text(
        f"path: {folder.resolve()}\ntrain: images/train\nval: images/val\n{extra}names:\n{names}\n", encoding="utf-8"
    )
    return data


def draw_one(generator: random.Random, size: int, kind: int) -> Image.Image:
    """An image that holds objects of one class only, for classification."""
    while True:
        image, objects = draw(generator, size, most=1)
        if objects[0][0] == kind:
            return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=400, help="images to train on")
    parser.add_argument("--val", type=int, default=100, help="images to validate on")
    parser.add_argument("--size", type=int, default=160, help="px")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--task", choices=("detect", "segment", "obb", "pose", "classify"), default="detect")
    given = parser.parse_args()
    print(write(given.folder, given.train, given.val, given.size, given.seed, given.task))


if __name__ == "__main__":
    main()
