"""Each component agrees with diffusers' or transformers' own."""

import pytest

from tests.parity.components import component_rows


@pytest.mark.parametrize("variant", ["default", "head128"])
def test_component_table(variant, ours, tiny_variant):
    """Every component is within its bound, and its error against float64 is at most twice that of the reference."""
    rows = component_rows(tiny_variant(variant), ours(variant))
    assert [row for row in rows if not row.ok] == []
    assert len(rows) == len({row.component for row in rows}) >= 10


def test_token_ids_are_those_of_transformers(ours, tiny_checkpoint):
    """tokenizer.json read by `tokenizers` gives the ids that transformers gives, for any script and any length."""
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_checkpoint / "tokenizer")
    prompts = [
        "",
        "a red fox",
        "\u96ea\u5c71 \U0001f98a\u200d\U0001f525 caf\u00e9",
        "\u0645\u0631\u062d\u0628\u0627",
        "x" * 3000,
        "a  b\n\tc &amp;lt;b&gt;",
    ]
    for prompt in prompts:
        expected = theirs(prompt_clean(prompt), truncation=True, max_length=512).input_ids
        assert list(ours().text_encoder._tokenizer.encode(prompt).ids) == expected
