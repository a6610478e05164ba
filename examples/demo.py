"""`make demo`: the main job of one host, from nothing to a result, with its figure checked.

python examples/demo.py yolo | hf | easyocr
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import time
from pathlib import Path

import shapes

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo"
WANTED_MAP50 = 0.85
WANTED_ACCURACY = 0.6


def yolo() -> int:
    """Train YOLOv8n from scratch on drawn shapes through the stock command; 0 when mAP50 is reached."""
    data = shapes.write(OUT / "shapes")
    run = OUT / "runs" / "yolo"
    shutil.rmtree(run, ignore_errors=True)
    script = Path(sys.executable).with_name("yolo")
    command = [
        str(script), "train", "model=yolov8n.yaml", f"data={data}", "imgsz=160", "epochs=6", "batch=8",
        "optimizer=AdamW", "lr0=0.002", "warmup_epochs=1", "close_mosaic=2", "seed=0", "plots=False",
        f"project={run.parent}", f"name={run.name}", "exist_ok=True",
        "callbacks=plugins.yolo", "accel.effective_batch=16", "accel.precision=auto",
        "accel.memory_format=channels_last",
    ]  # fmt: skip
    print("$", " ".join(["yolo", *command[1:]]), flush=True)
    began = time.monotonic()
    done = subprocess.run(command, check=False)
    if done.returncode:
        return done.returncode
    with (run / "results.csv").open(encoding="utf-8") as file:
        reached = max(float(row["metrics/mAP50(B)"]) for row in csv.DictReader(file))
    print(f"\nmAP50 {reached:.3f} (wanted {WANTED_MAP50}) after {time.monotonic() - began:.0f} s")
    print(f"report  {run / 'accel_report.html'}")
    print(f"weights {run / 'weights' / 'best.pt'}")
    return 0 if reached >= WANTED_MAP50 else 1


def hf() -> int:
    """Train a text classifier on docstrings with the Trainer and the callback; 0 when the accuracy is reached."""
    run = OUT / "runs" / "hf"
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, str(ROOT / "examples" / "hf_text_accel.py"), "--output", str(run)]
    print("$", "python", " ".join(command[1:]), flush=True)
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode:
        return done.returncode
    reached = float(done.stdout.rsplit("accuracy", 1)[1].split()[0])
    print(f"accuracy {reached:.3f} (wanted {WANTED_ACCURACY})")
    print(f"report  {run / 'accel_report.html'}")
    return 0 if reached >= WANTED_ACCURACY else 1


def easyocr() -> int:
    """Fine-tune EasyOCR's own recognizer on lines that it misreads, then read with the Reader; 0 when it can."""
    script = [sys.executable, str(ROOT / "examples" / "easyocr_finetune.py")]
    command = [*script, "--config", str(ROOT / "examples" / "easyocr_en.yaml")]
    print("$", "python examples/easyocr_finetune.py --config examples/easyocr_en.yaml", flush=True)
    return subprocess.run(command, check=False, cwd=ROOT).returncode


DEMOS = {"yolo": yolo, "hf": hf, "easyocr": easyocr}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=sorted(DEMOS), help="which host's demo to run")
    return DEMOS[parser.parse_args().host]()


if __name__ == "__main__":
    sys.exit(main())
