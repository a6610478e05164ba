"""Fine-tunes EasyOCR's English recognizer on rendered lines of a font that it misreads, and reads a page with it.

    python examples/easyocr_finetune.py --config examples/easyocr_en.yaml

Renders the data set, reads the held-out lines with the stock weights, trains, and reads them again, both times with
`easyocr.Reader`. With your own crops: put them and a labels.csv (`filename,words`) into train_data and valid_data.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import easyocr_en_models
import numpy as np
import yaml
from easyocr import Reader
from PIL import Image
from render_lines import line, text

from plugins.easyocr import fit

HARD = "cmtt10"  # TeX's typewriter: the stock weights put spaces before its punctuation
STOCK_BELOW, WANTED = 0.90, 0.97  # word accuracy before and after
OTHERS = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "DejaVuSansMono-Bold")
# EasyOCR pins memory for every crop, with or without a GPU, and torch says so every time.
warnings.filterwarnings("ignore", message=".*pin_memory.*")
STOCK = Path(easyocr_en_models.__file__).parent / "models"


def render(folder: Path, fonts: list[str], count: int, seed: int) -> None:
    """Writes `count` lines and their labels.csv; fonts take turns."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    rows = ["filename,words"]
    for number in range(count):
        words = text(rng)
        line(words, fonts[number % len(fonts)], rng).save(folder / f"{number:05d}.png")
        rows.append(f"{number:05d}.png,{words}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def word_accuracy(reader: Any, folder: Path) -> float:
    """Share of the folder's lines that `reader` reads without a mistake."""
    rows = (folder / "labels.csv").read_text(encoding="utf-8").splitlines()[1:]
    pairs = [row.split(",", 1) for row in rows]
    read = [reader.recognize(str(folder / name), detail=0)[0] for name, _ in pairs]
    return sum(a == label for a, (_, label) in zip(read, pairs, strict=True)) / len(pairs)


def page(seed: int, lines: int = 5) -> tuple[np.ndarray, list[str]]:
    """A white page, uint8 [H, W], of lines that no training line shares its picture with; and its texts."""
    rng = np.random.default_rng(seed)
    texts = [text(rng) for _ in range(lines)]
    sheet = Image.new("L", (520, 70 * lines + 30), 255)
    for number, words in enumerate(texts):
        sheet.paste(line(words, HARD, rng, plain=True), (30, 20 + 70 * number))
    return np.asarray(sheet), texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/easyocr_en.yaml")
    parser.add_argument("--lines", type=int, default=800, help="training lines")
    parser.add_argument("--held_out", type=int, default=200, help="held-out lines")
    parser.add_argument("--num_iter", type=int, help="updates, instead of the configuration's")
    arguments = parser.parse_args()
    settings = yaml.safe_load(Path(arguments.config).read_text(encoding="utf-8"))
    train, valid = Path(settings["train_data"]), Path(settings["valid_data"])
    render(train, [HARD, HARD, *OTHERS], arguments.lines, seed=1)
    render(valid, [HARD], arguments.held_out, seed=2)
    shutil.rmtree(Path(settings["output"]) / settings["experiment_name"], ignore_errors=True)

    stock = Reader(
        ["en"], gpu=False, quantize=False, download_enabled=False, verbose=False, model_storage_directory=str(STOCK)
    )
    before = word_accuracy(stock, valid)
    print(f"stock english_g2 reads {before:.1%} of the held-out {HARD} lines")

    options = {"num_iter": arguments.num_iter} if arguments.num_iter else {}
    result = fit(arguments.config, saved_model=str(STOCK / "english_g2.pth"), **options)

    tuned = result.reader()
    after = word_accuracy(tuned, valid)
    print(f"{result.exported.name} reads {after:.1%} of them (validation said {result.accuracy:.1%})")

    sheet, written = page(seed=3)
    print(f"a held-out page says   {written}")
    print(f"stock weights read     {stock.readtext(sheet, width_ths=1.5, detail=0)}")
    print(f"fine-tuned weights read {tuned.readtext(sheet, width_ths=1.5, detail=0)}")
    print(f"everything is in {result.folder}; the report is {result.report}")
    return 0 if before < STOCK_BELOW and after >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
