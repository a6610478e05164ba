"""What of easyocr the plug touches."""

from __future__ import annotations

from integrations.versions import Symbol

TABLE = (
    Symbol("easyocr:Reader"),
    Symbol("easyocr:Reader.recognize"),
    Symbol("easyocr.config:all_lang_list"),
    Symbol("easyocr.config:recognition_models[gen2]"),
    Symbol("easyocr.config:detection_models"),
    Symbol("easyocr.config:BASE_PATH"),
    Symbol("easyocr.config:MODULE_PATH"),
    Symbol("easyocr.utils:calculate_md5"),
    Symbol("easyocr.utils:CTCLabelConverter"),
    Symbol("easyocr.utils:compute_ratio_and_resize"),
    Symbol("easyocr.recognition:adjust_contrast_grey"),
    Symbol("easyocr.recognition:custom_mean"),
    Symbol("datasets:load_from_disk"),
)
