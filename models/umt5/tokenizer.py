"""Prompts to token ids, from a checkpoint's tokenizer folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from models.errors import ModelError
from models.umt5.spec import MAX_TOKENS, clean_prompt

_SPIECE = "spiece.model"
_FAST = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of one prompt; `num_tokens` counts them before truncation, the end mark included."""

    ids: tuple[int, ...]
    num_tokens: int

    @property
    def truncated(self) -> bool:
        """Whether the end of the prompt was cut off."""
        return self.num_tokens > len(self.ids)


class PromptTokenizer:
    """Cleans and tokenizes prompts to at most 512 tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @classmethod
    def load(cls, folder: Path) -> "PromptTokenizer":
        """Read tokenizer.json, or convert spiece.model; raises ModelError("checkpoint")."""
        try:
            if (folder / _FAST).is_file():
                return cls(Tokenizer.from_file(str(folder / _FAST)))
            if (folder / _SPIECE).is_file():
                return cls(_convert_spiece(folder))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError("checkpoint", f"{folder}: tokenizer not readable ({error}); fetch it again") from error
        raise ModelError("checkpoint", f"{folder}: neither {_FAST} nor {_SPIECE}; the checkpoint is incomplete")

    def encode(self, prompt: str, long_prompt: str = "truncate") -> Tokens:
        """Ids of the cleaned prompt; above 512 tokens cut (the end mark stays) or, with "fail", ModelError("input")."""
        text = clean_prompt(prompt)
        ids = self._tokenizer.encode(text).ids
        num_tokens = len(ids)
        if num_tokens <= MAX_TOKENS:
            return Tokens(tuple(ids), num_tokens)
        if long_prompt == "fail":
            raise ModelError("input", f"prompt has {num_tokens} tokens, the model reads {MAX_TOKENS}; shorten it")
        self._tokenizer.enable_truncation(MAX_TOKENS)
        ids = self._tokenizer.encode(text).ids
        self._tokenizer.no_truncation()
        return Tokens(tuple(ids), num_tokens)


def _convert_spiece(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(str(folder))
    tokenizer: Tokenizer = loaded.backend_tokenizer
    return tokenizer
