"""The tokenizer and the text encoder of `pocket`."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import pocket_pair
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from models.pocket import grammar

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
MAX_LENGTH = 512
SPACE = "\u2581"
WIDTH = 128


def make_tokenizer(work: Path, log: Callable[[str], None]) -> None:
    """Stage `tokenizer`: a unigram tokenizer: the grammar's words, letters, and bytes for any other text."""
    if not pocket_pair.is_first():
        return
    pieces = [(PAD, 0.0), (EOS, 0.0), (UNKNOWN, 0.0)]
    pieces += [(f"<0x{byte:02X}>", -14.0) for byte in range(256)]
    pieces += [(SPACE + word, -4.0) for word in _words()]
    pieces += [(letter, -9.0) for letter in string.printable.strip() if not letter.isupper()]
    pieces += [(SPACE, -9.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=MAX_LENGTH,
        padding_side="right",
    ).save_pretrained(work / "tokenizer")
    log(f"{len(pieces)} pieces")


def _words() -> list[str]:
    """Every word of the grammar, in order of first use."""
    return list(dict.fromkeys(w for caption in grammar.captions() for w in caption.prompt.split()))


def make_encoder(vocabulary: int) -> UMT5EncoderModel:
    """A UMT5 encoder of two layers, 8 heads and width 128, freshly drawn."""
    config = UMT5Config(
        vocab_size=-(-vocabulary // 32) * 32,
        d_model=WIDTH,
        d_kv=16,
        d_ff=256,
        num_layers=2,
        num_heads=8,
        relative_attention_num_buckets=32,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    encoder = UMT5EncoderModel(config)
    with torch.no_grad():  # T5's draw has unit variance; the loss would need long to shrink it
        encoder.shared.weight.normal_(0, 0.3)
    return encoder


def tokenize(tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Token ids and mask, [B, L] int64 each, L the longest prompt."""
    tokens = tokenizer(prompts, padding=True, return_tensors="pt")
    return tokens.input_ids, tokens.attention_mask
