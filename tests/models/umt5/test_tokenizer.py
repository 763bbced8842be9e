"""Prompts are cleaned and cut exactly as diffusers does it, and nothing is cut in silence."""

import shutil

import pytest
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from models.errors import ModelError
from models.umt5.spec import clean_prompt
from models.umt5.tokenizer import PromptTokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    """The tokenizer of `tiny`."""
    return PromptTokenizer.load(tiny_checkpoint / "tokenizer")


def test_cleaning_is_diffusers_for_every_character():
    """Every character of the basic plane is cleaned as diffusers cleans it, between letters and at both ends."""
    characters = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000]
    inside = ["a".join(characters[start : start + 64]) for start in range(0, len(characters), 64)]
    ends = [f"{character} a{character}" for character in characters if not character.isprintable()]
    assert [text for text in inside + ends if clean_prompt(text) != prompt_clean(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "a\r\n\tb",
        "&amp;lt;b&amp;gt;",
        "&lt;i&gt; caf\u00c3\u00a9",
        "\u201cquoted\u201d \u2026",
        "\u0645\u0631\u062d\u0628\u0627 \U0001f98a\u200d\U0001f525",
        "\ufb01sh \u3000 x",
    ],
)
def test_cleaning_of_whole_texts(text):
    """HTML twice, broken encodings, quotes, emoji, right-to-left text: as diffusers."""
    assert clean_prompt(text) == prompt_clean(text)


def test_any_text_has_tokens(tokenizer):
    """Characters outside the vocabulary become bytes: no text ends in the unknown token."""
    unknown = 2
    for text in ("\u96ea\u5c71", "\U0001f98a", "\u0645\u0631\u062d\u0628\u0627", "caf\u00e9", "\U00020000"):
        assert unknown not in tokenizer.encode(text).ids


def test_exactly_512_tokens_are_kept(tokenizer):
    """511 pieces and the end mark fit; one more piece is cut, counted, and the end mark stays."""
    fits, longer = (tokenizer.encode("fox " * count) for count in (511, 512))
    assert (len(fits.ids), fits.num_tokens, fits.truncated) == (512, 512, False)
    assert (len(longer.ids), longer.num_tokens, longer.truncated) == (512, 513, True)
    assert longer.ids[-1] == 1


def test_long_prompts_can_fail(tokenizer):
    """With "fail" a long prompt is an input error that says how long it is; a short one passes."""
    with pytest.raises(ModelError, match="prompt has 513 tokens, the model reads 512") as caught:
        tokenizer.encode("fox " * 512, "fail")
    assert caught.value.kind == "input"
    assert tokenizer.encode("fox", "fail").num_tokens == 2


def test_truncation_leaves_no_trace(tokenizer):
    """A prompt after a truncated one is counted in full."""
    tokenizer.encode("fox " * 600)
    assert tokenizer.encode("fox " * 600).num_tokens == 601


def test_a_folder_without_a_tokenizer_is_incomplete(tmp_path):
    """Neither tokenizer.json nor spiece.model is a checkpoint error."""
    with pytest.raises(ModelError, match=r"neither tokenizer\.json nor spiece\.model") as caught:
        PromptTokenizer.load(tmp_path)
    assert caught.value.kind == "checkpoint"


def test_a_damaged_tokenizer_is_named(tiny_checkpoint, tmp_path):
    """A cut tokenizer.json is a checkpoint error with its folder."""
    shutil.copytree(tiny_checkpoint / "tokenizer", tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="tokenizer not readable"):
        PromptTokenizer.load(tmp_path / "tokenizer")


def test_a_sentencepiece_folder_is_converted(tmp_path):
    """A folder with spiece.model alone gives the pieces of sentencepiece, then the end mark."""
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("a red fox jumps over the river\n" * 50 + "the quick brown fox and the lazy dog\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "spiece"), vocab_size=34, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2
    )  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer", "extra_ids": 0}')
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model")).encode("the red fox")
    assert list(PromptTokenizer.load(tmp_path).encode("the red fox").ids) == [*pieces, 1]
