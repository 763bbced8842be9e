"""FP8: which layers are converted, how far results move, and that FP8 checkpoints of every common form are read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import ModelError
from models.fp8_checkpoint import plain, scale_keys
from models.parallel.mesh import single
from models.quantize import Fp8Linear, Quantization, module_errors, quantization, quantize
from models.wan.model import WanTransformer
from models.wan.parallelize import load_expert
from models.wan.pipeline import PipelineOptions, Sampling, WanPipeline
from models.wan.rope import rope_tables
from models.wan.spec import transformer_spec

GRID = (3, 3, 5)
LAYERS = ["attn1.to_qkv", "attn1.to_out", "attn2.to_q", "attn2.to_kv", "attn2.to_out", "ffn.up", "ffn.down"]


def dit(in_channels=16):
    """A DiT of two blocks with random weights; I2V's has 36 input channels."""
    config = {
        "num_attention_heads": 4, "attention_head_dim": 32, "in_channels": in_channels, "out_channels": 16, "text_dim": 64,
        "freq_dim": 64, "ffn_dim": 256, "num_layers": 2, "patch_size": [1, 2, 2], "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
    }  # fmt: skip
    model = WanTransformer(transformer_spec(config))
    make = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = float("norm" in name and name.endswith("weight"))
            parameter.copy_(
                gain + torch.randn(parameter.shape, generator=make) * (0.05 if gain else parameter.shape[-1] ** -0.5)
            )
    return model.eval()


def forward(model):
    """One velocity."""
    make = torch.Generator().manual_seed(1)
    latents = torch.randn(1, model.spec.in_channels, 3, 6, 10, generator=make)
    text = torch.randn(1, 7, 64, generator=make)
    with torch.inference_mode():
        return model(latents, torch.tensor([500.0]), model.text_keys(text), rope_tables(GRID, 32))


@pytest.mark.parametrize("in_channels", [16, 36])
@pytest.mark.parametrize("fp8_max", [240.0, 448.0])
def test_all_linear_layers_of_the_blocks_are_converted(in_channels, fp8_max):
    """T2V and I2V: attention and feed-forward become FP8, everything else stays, and the velocity moves by a few percent."""
    model = dit(in_channels)
    expected = forward(model)
    errors = quantize(model, Quantization(fp8_max))
    assert set(errors) == {f"blocks.{block}.{layer}" for block in (0, 1) for layer in LAYERS}
    assert all(0 < error < 0.04 for error in errors.values())
    assert {name for name, part in model.named_modules() if isinstance(part, Fp8Linear)} == set(errors)
    moved = (forward(model) - expected).norm() / expected.norm()
    assert 1e-4 < moved < 0.08


def test_modules_can_be_left_alone():
    """Names and patterns keep modules with all that is inside; a name that fits nothing is refused."""
    model = dit()
    errors = quantize(model, Quantization(240.0, ("blocks.0", "blocks.*.ffn.down", "blocks.*.attn2")))
    assert set(errors) == {"blocks.1.attn1.to_qkv", "blocks.1.attn1.to_out", "blocks.1.ffn.up"}
    with pytest.raises(ModelError, match="names no module of the transformer"):
        quantize(dit(), Quantization(240.0, ("blocks.7",)))


def test_the_error_of_each_module_is_judged_on_its_own_inputs():
    """The report has every converted layer, errors of a few percent, and leaves the model as it was."""
    model = dit()
    before = forward(model)
    errors = module_errors(model, Quantization(240.0), lambda: forward(model))
    assert len(errors) == 2 * len(LAYERS)
    assert all(0.005 < error < 0.06 for error in errors.values())
    assert torch.equal(forward(model), before)


def test_the_largest_value_depends_on_the_device():
    """e4m3 ends at 240 on Trainium2 and at 448 elsewhere; an unknown name is refused."""
    assert quantization("none") is None
    assert quantization("fp8_row").fp8_max == 448.0
    assert quantization("fp8_row", ("blocks.0",), "neuron") == Quantization(240.0, ("blocks.0",))
    with pytest.raises(ModelError, match="'fp4' is unknown"):
        quantization("fp4")


def test_a_pipeline_renders_in_fp8(tiny_checkpoint):
    """A whole clip in FP8 is finite, near the plain one, and the pipeline says how it was computed."""
    sampling = Sampling("a red fox", "", 3, 48, 32, 5, 4, 3.0, 3.0, 3.0)
    options = PipelineOptions(quantization="fp8_row", modules_to_not_convert=("blocks.0.attn2",))
    latents = []
    for pipeline in (WanPipeline.load(tiny_checkpoint), WanPipeline.load(tiny_checkpoint, options)):
        latents.append(list(pipeline.denoise(sampling))[-1].latents)
    assert pipeline.describe()["quantization"] == "fp8_row"
    assert pipeline.describe()["modules_to_not_convert"] == ["blocks.0.attn2"]
    assert 0 < (latents[1] - latents[0]).norm() / latents[0].norm() < 0.2


def to_fp8(weight, form):
    """A weight in one of the common FP8 forms: the tensors to store under its name."""
    amax = weight.abs().amax(dim=None if form != "channel" else 1, keepdim=form == "channel")
    scale = amax / 448.0
    if form == "cast":
        return {".weight": weight.to(torch.float8_e4m3fn)}
    if form == "block":
        rows, columns = (-(-n // 128) for n in weight.shape)
        scale = torch.rand(rows, columns) + 1  # any numbers that keep the weight within range
        scale *= amax / 448.0
        spread = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        return {".weight": (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn), ".weight_scale_inv": scale}
    name = {"tensor": ".scale_weight", "channel": ".weight_scale"}[form]
    return {".weight": (weight / scale).to(torch.float8_e4m3fn), name: scale.reshape(()) if form == "tensor" else scale}


@pytest.mark.parametrize("form", ["cast", "tensor", "channel", "block"])
def test_fp8_checkpoints_are_read(tiny_checkpoint, tmp_path, form):
    """Checkpoints with one scale per tensor, per channel, per block or none load, and give nearly the plain velocity."""
    folder = tmp_path / "transformer"
    shutil.copytree(tiny_checkpoint / "transformer", folder)
    [file] = folder.glob("*.safetensors")
    tensors = {}
    for key, tensor in load_file(file).items():
        layer = key.removesuffix(".weight")
        inside = key.startswith("blocks.") and key.endswith(".weight") and tensor.ndim == 2
        tensors |= {f"{layer}{end}": part for end, part in to_fp8(tensor, form).items()} if inside else {key: tensor}
        if inside and form == "tensor":
            tensors[f"{layer}.scale_input"] = torch.ones(())
    if form == "tensor":
        tensors["scaled_fp8"] = torch.zeros(0)
    save_file(tensors, file)
    plain_model, ours = (
        load_expert(f, torch.float32, torch.device("cpu"), single()) for f in (tiny_checkpoint / "transformer", folder)
    )

    def velocity(model):
        make = torch.Generator().manual_seed(1)
        latents, text = torch.randn(1, 16, 3, 6, 10, generator=make), torch.randn(1, 7, 64, generator=make)
        with torch.inference_mode():
            return model(
                latents, torch.tensor([500.0]), model.text_keys(text), rope_tables(GRID, model.spec.attention_head_dim)
            )

    expected = velocity(plain_model)
    error = (velocity(ours) - expected).norm() / expected.norm()
    assert 0 < error < 0.1


def test_parts_of_fp8_weights_take_their_part_of_the_scales():
    """A rank's rows or columns of a weight are multiplied by the same scales as in the whole weight."""
    whole = torch.randn(200, 300).to(torch.float8_e4m3fn)
    rows, columns, every = slice(50, 100), slice(150, 300), slice(None)
    for scale in (torch.tensor(0.5), torch.rand(200), torch.rand(200, 1), torch.rand(2, 3)):
        full = plain(whole, scale, every, every, "w")
        assert torch.equal(plain(whole[rows], scale, rows, every, "w"), full[rows])
        assert torch.equal(plain(whole[:, columns], scale, every, columns, "w"), full[:, columns])
    with pytest.raises(ModelError, match=r"w: a scale of shape \[7\] does not fit"):
        plain(whole, torch.rand(7), every, every, "w")


def test_only_scales_beside_a_weight_are_scales():
    """A key that merely ends like a scale is a parameter, and is not swallowed."""
    keys = ["a.weight", "a.weight_scale", "b.weight_scale", "a.input_scale", "scaled_fp8", "c.weight"]
    assert scale_keys(keys) == ({"a.weight": "a.weight_scale"}, {"a.weight_scale", "a.input_scale", "scaled_fp8"})
    assert json.dumps(sorted(scale_keys(["x.bias"])[1])) == "[]"
