"""Renders text lines with the fonts that matplotlib installs: words, numbers and punctuation, by a fixed seed."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
WORDS = """
water river stone paper invoice total amount market garden winter summer number station engine bridge letter signal
window copper silver forest harbour cotton sugar coffee receipt balance payment delivery express north south quality
weight length voltage current pressure kitchen morning evening quick brown jumps lazy vexing
""".split()  # noqa: SIM905 a list of words is easier to read without quotes


def text(rng: np.random.Generator) -> str:
    """One or two words, a number, a price, a date, a code, or words with punctuation."""
    word = str(rng.choice(WORDS))
    word = [word, word.capitalize(), word.upper()][rng.integers(3)]
    kind = rng.integers(6)
    if kind == 0:
        return f"{word} {rng.choice(WORDS)}"
    if kind == 1:
        return str(rng.integers(10, 10**7))
    if kind == 2:
        return f"{rng.integers(1, 5000)}.{rng.integers(0, 100):02d}"
    if kind == 3:
        return f"{rng.integers(1, 29):02d}/{rng.integers(1, 13):02d}/{rng.integers(1990, 2030)}"
    if kind == 4:
        return f"{word}{rng.choice(list('.,:;!?'))}"
    return word


def line(words: str, font: str, rng: np.random.Generator, size: int = 32, plain: bool = False) -> Image.Image:
    """One grey picture of `words`: its own size (px) and margins; its own paper, ink and grain unless `plain`."""
    face = ImageFont.truetype(str(FONTS / f"{font}.ttf"), int(size * rng.uniform(0.8, 1.25)))
    left, top, right, bottom = face.getbbox(words)
    margin = rng.integers(2, 8, 4)
    width, height = int(right - left + margin[0] + margin[1]), int(bottom - top + margin[2] + margin[3])
    paper, ink = rng.uniform(170, 255), rng.uniform(0, 90)
    if rng.random() < 0.2:
        paper, ink = ink, paper
    if plain:
        paper, ink = 255, 0
    picture = Image.new("L", (width, height), int(paper))
    ImageDraw.Draw(picture).text((margin[0] - left, margin[2] - top), words, font=face, fill=int(ink))
    if plain:
        return picture
    slope = np.linspace(0, rng.uniform(-25, 25), width)[None]
    grain = rng.normal(0, rng.uniform(0, 8), (height, width))
    return Image.fromarray((np.asarray(picture, float) + slope + grain).clip(0, 255).astype(np.uint8))
