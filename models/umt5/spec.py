"""Sizes of UMT5 encoders and the rule that cleans prompts; imports no torch."""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import ModelError

MAX_TOKENS = 512  # Wan's text length; longer prompts are truncated or refused
WARN_TOKENS = 320  # users report that quality falls above this
# Unicode's White_Space property: \s in the `regex` package that diffusers uses; Python's `re` adds U+001C..1F.
_WHITE_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")


@dataclass(frozen=True, slots=True)
class Umt5Spec:
    """Sizes of one encoder; the names are those of its config.json."""

    vocab_size: int = 256384
    d_model: int = 4096
    d_kv: int = 64
    d_ff: int = 10240
    num_layers: int = 24
    num_heads: int = 64
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6

    @property
    def num_parameters(self) -> int:
        """Parameters of the encoder, embedding included."""
        attention = 4 * self.d_model * self.d_kv * self.num_heads + self.relative_attention_num_buckets * self.num_heads
        layer = attention + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return self.vocab_size * self.d_model + self.num_layers * layer + self.d_model


UMT5_XXL = Umt5Spec()


def umt5_spec(config: Mapping[str, Any]) -> Umt5Spec:
    """Sizes from a text encoder's config.json; raises ModelError("unsupported")."""
    activation = config.get("feed_forward_proj", "gated-gelu")
    if activation != "gated-gelu":
        raise ModelError("unsupported", f"text encoder: feed_forward_proj {activation!r}; only 'gated-gelu' is known")
    names = Umt5Spec.__dataclass_fields__
    absent = [
        name for name in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "d_kv") if name not in config
    ]
    if absent:
        raise ModelError("checkpoint", f"text encoder: config.json lacks {', '.join(absent)}")
    return Umt5Spec(**{name: config[name] for name in names if name in config})


def clean_prompt(text: str) -> str:
    """The prompt as the tokenizer sees it: ftfy, HTML unescaped twice, white space collapsed (diffusers' rule)."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _WHITE_SPACE.sub(" ", text).strip()
