"""A zoo of tiny heads from configs, and batches for them. Dropout is off, sizes are a few thousand parameters."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t

VOCAB, HIDDEN, LENGTH = 40, 16, 12

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attn_implementation": "eager",
    "initializer_range": 0.2,
}
_NO_DROP: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert(**more: Any) -> t.BertConfig:
    return t.BertConfig(**_TEXT, **_NO_DROP, **more)


def _gpt2() -> t.GPT2Config:
    return t.GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=2,
        n_inner=24,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        summary_first_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )


def _vit() -> t.ViTConfig:
    return t.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=8,
        num_labels=3,
        **_NO_DROP,
    )


def _resnet() -> t.ResNetConfig:
    return t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)


def _t5() -> t.T5Config:
    return t.T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=24,
        num_layers=3,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


def _distil() -> t.DistilBertConfig:
    return t.DistilBertConfig(
        vocab_size=VOCAB,
        dim=HIDDEN,
        n_layers=2,
        n_heads=2,
        hidden_dim=24,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        qa_dropout=0.0,
        num_labels=3,
    )


def _roberta(**more: Any) -> t.RobertaConfig:
    return t.RobertaConfig(**{**_TEXT, "max_position_embeddings": 80, "pad_token_id": 1}, **_NO_DROP, **more)


def _llama() -> t.LlamaConfig:
    return t.LlamaConfig(**_TEXT, num_key_value_heads=2)


MODELS: dict[str, Any] = {
    "bert-sequence": lambda: t.BertForSequenceClassification(_bert(num_labels=3)),
    "bert-multilabel": lambda: t.BertForSequenceClassification(
        _bert(num_labels=3, problem_type="multi_label_classification")
    ),
    "bert-regression": lambda: t.BertForSequenceClassification(_bert(num_labels=1)),
    "bert-token": lambda: t.BertForTokenClassification(_bert(num_labels=3)),
    "bert-masked": lambda: t.BertForMaskedLM(_bert()),
    "bert-question": lambda: t.BertForQuestionAnswering(_bert()),
    "bert-choice": lambda: t.BertForMultipleChoice(_bert()),
    "distilbert-sequence": lambda: t.DistilBertForSequenceClassification(_distil()),
    "roberta-token": lambda: t.RobertaForTokenClassification(_roberta(num_labels=3)),
    "gpt2-causal": lambda: t.GPT2LMHeadModel(_gpt2()),
    "llama-causal": lambda: t.LlamaForCausalLM(_llama()),
    "vit-image": lambda: t.ViTForImageClassification(_vit()),
    "resnet-image": lambda: t.ResNetForImageClassification(_resnet()),
    "t5-seq2seq": lambda: t.T5ForConditionalGeneration(_t5()),
}
HEADS = list(MODELS)


def model_for(head: str, seed: int = 0) -> Any:
    """A fresh model of this head, the same for the same seed."""
    torch.manual_seed(seed)
    return MODELS[head]().train()


def batch_for(head: str, size: int, uneven: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of `size` samples, [B, 12] tokens or [B, 3, 16, 16] pixels; with `uneven` 1 to 12 tokens count a row."""
    g = torch.Generator().manual_seed(seed)
    if head.endswith("-image"):
        return {
            "pixel_values": torch.randn(size, 3, 16, 16, generator=g),
            "labels": torch.randint(0, 3, (size,), generator=g),
        }
    ids = torch.randint(3, VOCAB, (size, LENGTH), generator=g)
    valid = torch.tensor([1 + (5 * i + 3) % LENGTH if uneven else LENGTH for i in range(size)])
    mask = (torch.arange(LENGTH)[None] < valid[:, None].clamp(min=2)).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    counted = torch.arange(LENGTH)[None] < valid[:, None]
    task = head.split("-")[1]
    if task == "sequence":
        batch["labels"] = torch.randint(0, 3, (size,), generator=g)
    elif task == "multilabel":
        batch["labels"] = torch.randint(0, 2, (size, 3), generator=g).float()
    elif task == "regression":
        batch["labels"] = torch.rand(size, generator=g)
    elif task in ("token", "masked"):
        labels = torch.randint(0, 3 if task == "token" else VOCAB, (size, LENGTH), generator=g)
        batch["labels"] = labels.masked_fill(~counted, -100)
    elif task == "causal":
        batch["labels"] = ids.masked_fill(~counted, -100)
        batch["labels"][:, 1] = ids[:, 1]  # at least one target after the shift
    elif task == "seq2seq":
        labels = torch.randint(3, VOCAB, (size, LENGTH), generator=g)
        batch["labels"] = labels.masked_fill(~counted, -100)
    elif task == "question":
        batch["start_positions"] = torch.randint(0, 4, (size,), generator=g)
        batch["end_positions"] = torch.randint(4, 8, (size,), generator=g)
    elif task == "choice":
        batch = {k: torch.stack([v, v.flip(0)], dim=1) for k, v in batch.items()}
        batch["labels"] = torch.randint(0, 2, (size,), generator=g)
    return batch


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of a batch as a dataset; the host's default collator stacks them again."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[index] for name, value in self.batch.items()}
