"""LoRA merged at load equals diffusers with the same files loaded, in every common key form."""

import pytest
import torch

from models.errors import ModelError
from models.lora import Adapter
from models.wan.pipeline import PipelineOptions, WanPipeline
from tests.parity import lora
from tests.parity.compare import TRAJECTORY_BOUND, VELOCITY_BOUND, our_latents, our_velocity, relative
from tests.parity.reference import Trace, load_reference, record, sampling

CLIP = sampling(steps=4)
STEP = sampling(steps=1)
FORMS = {"peft": None, "original": 8, "original A": None, "joined": 8, "metadata": None}


def with_adapters(folder, *adapters):
    """Our pipeline with these adapters."""
    return WanPipeline.load(folder, PipelineOptions(adapters=adapters))


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of every second adapter
def test_merged_lora_is_diffusers_lora(tiny_checkpoint, tmp_path):
    """Two files on the high-noise expert and one on the low, each with a strength: velocities at all steps and the
    trajectory agree with diffusers, which keeps the files apart."""
    files = [lora.write(tmp_path / f"{n}.safetensors", form, seed=n, alpha=a) for n, (form, a) in FILES.items()]
    pipe = load_reference(tiny_checkpoint, "unipc", CLIP.flow_shift)
    for number, path in enumerate(files):
        low = {"load_into_transformer_2": number == 2}
        pipe.load_lora_weights(str(tmp_path), weight_name=path.name, adapter_name=f"a{number}", **low)
    pipe.transformer.set_adapters(["a0", "a1"], [0.7, -0.4])
    pipe.transformer_2.set_adapters(["a2"], [1.0])
    trace = Trace(pipe.config.boundary_ratio * 1000)
    record(pipe, trace)
    generator = torch.Generator().manual_seed(CLIP.seed)
    settings = {"width": CLIP.width, "height": CLIP.height, "num_frames": CLIP.num_frames, "output_type": "latent"}
    settings |= {"guidance_scale": CLIP.guidance_high, "guidance_scale_2": CLIP.guidance_low}
    settings |= {"prompt": CLIP.prompt, "negative_prompt": CLIP.negative_prompt, "generator": generator}
    final = pipe(**settings, num_inference_steps=CLIP.steps).frames
    strengths = ((0.7, "high"), (-0.4, "high"), (1.0, "low"))
    ours = with_adapters(
        tiny_checkpoint, *(Adapter(str(path), *how) for path, how in zip(files, strengths, strict=True))
    )
    for step, latents in enumerate(trace.latents):
        assert relative(our_velocity(ours, CLIP, step, latents), trace.velocities[step][0]) <= VELOCITY_BOUND
    assert relative(our_latents(ours, CLIP), final) <= TRAJECTORY_BOUND
    assert relative(our_latents(with_adapters(tiny_checkpoint), CLIP), final) > 0.01


FILES = {0: ("diffusers", None), 1: ("original", 8), 2: ("diffusers", None)}


def test_key_forms_mean_the_same(tiny_checkpoint, tmp_path):
    """Every key form gives the very bits of the plain one; an alpha of twice the rank is a strength of 2."""
    plain = lora.write(tmp_path / "plain.safetensors", "diffusers")
    expected = {s: our_latents(with_adapters(tiny_checkpoint, Adapter(str(plain), s)), STEP) for s in (1.0, 2.0)}
    for form, alpha in FORMS.items():
        path = lora.write(tmp_path / "other.safetensors", form, alpha=alpha)
        found = our_latents(with_adapters(tiny_checkpoint, Adapter(str(path))), STEP)
        assert torch.equal(found, expected[2.0 if alpha or form == "metadata" else 1.0])


def test_whole_differences(tiny_checkpoint, tmp_path):
    """`.diff` of a weight and `.diff_b` of a bias are added times the strength; other tensors keep their bits."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(128, 256, generator=generator), torch.randn(128, generator=generator)
    name = "diffusion_model.blocks.1.ffn.2"
    save_file({f"{name}.diff": weight, f"{name}.diff_b": bias}, tmp_path / "a.safetensors")
    plain, found = (
        with_adapters(tiny_checkpoint, *some).experts.model("high")
        for some in ((), (Adapter(str(tmp_path / "a.safetensors"), 0.5),))
    )
    assert torch.equal(found.blocks[1].ffn.down.weight, plain.blocks[1].ffn.down.weight + 0.5 * weight)
    assert torch.equal(found.blocks[1].ffn.down.bias, plain.blocks[1].ffn.down.bias + 0.5 * bias)
    assert torch.equal(found.blocks[1].ffn.up.weight, plain.blocks[1].ffn.up.weight)


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '{"lora_alpha": 8, "r": 0}', '{"lora_alpha": "much", "r": 4}'],
    ids=["cut", "list", "0", "word"],
)
def test_odd_metadata(tiny_checkpoint, tmp_path, text):
    """Metadata that is no JSON object, or states no factor, is one error that names the file."""
    from safetensors.torch import load_file, save_file

    path = lora.write(tmp_path / "a.safetensors", "diffusers")
    save_file(load_file(path), path, {"lora_adapter_metadata": text})
    with pytest.raises(ModelError, match=r"a\.safetensors: .* in its metadata|a\.safetensors: its metadata") as caught:
        with_adapters(tiny_checkpoint, Adapter(str(path)))
    assert caught.value.kind == "checkpoint"


def test_strength_zero_is_no_lora(tiny_checkpoint, tmp_path, ours):
    """At strength 0 the latents have the bits of the checkpoint alone."""
    path = lora.write(tmp_path / "a.safetensors", "diffusers")
    found = our_latents(with_adapters(tiny_checkpoint, Adapter(str(path), 0.0)), STEP)
    assert torch.equal(found, our_latents(ours(), STEP))


def test_an_adapter_changes_its_expert_alone(tiny_checkpoint, tmp_path):
    """`high` leaves the low-noise expert's weights alone and the other way round; so does diffusers' second prefix."""
    path = lora.write(tmp_path / "a.safetensors", "diffusers")
    plain = with_adapters(tiny_checkpoint)
    for stage, other in (("high", "low"), ("low", "high")):
        found = with_adapters(tiny_checkpoint, Adapter(str(path), 1.0, stage))
        name = "blocks.0.ffn.up.weight"
        weights = {s: found.experts.model(s).get_parameter(name) for s in ("high", "low")}
        assert torch.equal(weights[other], plain.experts.model(other).get_parameter(name))
        assert not torch.equal(weights[stage], plain.experts.model(stage).get_parameter(name))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda t: t | {"transformer.blocks.9.attn1.to_q.lora_A.weight": torch.ones(4, 128)},
            r"blocks\.9\.attn1\.to_q",
        ),
        (lambda t: t | {"transformer.blocks.0.attn2.add_k_proj.lora_A.weight": torch.ones(4, 8)}, "add_k_proj"),
        (lambda t: {name: v for name, v in t.items() if "0.attn1.to_q.lora_B" not in name}, "has down alone"),
        (lambda t: {name: v[:, :64] if "lora_A" in name else v for name, v in t.items()}, "its change has shape"),
        (lambda t: {name: v[:3] if "lora_A" in name else v for name, v in t.items()}, "do not multiply"),
        (lambda t: {}, "no keys"),
    ],
)
def test_a_wrong_file_is_an_error_with_names(tiny_checkpoint, tmp_path, spoil, message):
    """Unknown layers, halves and wrong shapes stop the load and are named; nothing is skipped."""
    from safetensors.torch import load_file, save_file

    path = lora.write(tmp_path / "a.safetensors", "diffusers")
    save_file({name: value.clone() for name, value in spoil(load_file(path)).items()}, path)
    with pytest.raises(ModelError, match=message) as caught:
        with_adapters(tiny_checkpoint, Adapter(str(path)))
    assert caught.value.kind == "checkpoint"


def test_an_expert_that_is_not_there(tiny_variant, tmp_path):
    """A checkpoint with one expert refuses an adapter for the low-noise one."""
    path = lora.write(tmp_path / "a.safetensors", "diffusers", num_layers=2)
    with pytest.raises(ModelError, match="there is no expert 'low' in this model"):
        with_adapters(tiny_variant("single"), Adapter(str(path), 1.0, "low"))
