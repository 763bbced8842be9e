import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel


def test_whole_clip_autoencoder_equals_diffusers():
    """The training's whole-clip encode and decode give diffusers' frame-by-frame numbers to 1e-4."""
    import pocket_vae

    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1)
    video = torch.rand(1, 3, 9, 32, 48) * 2 - 1
    with torch.no_grad():
        mean, log_variance = pocket_vae.encode(vae, video)
        theirs = vae.encode(video).latent_dist
        assert (mean - theirs.mean).abs().max() < 1e-4
        assert (log_variance.clamp(-30, 20) - theirs.logvar).abs().max() < 1e-4
        decoded = pocket_vae.decode(vae, mean).clamp(-1, 1)
        assert (decoded - vae.decode(mean).sample).abs().max() < 1e-4


def test_a_single_frame_equals_diffusers():
    """The short cut for single frames gives the same numbers too."""
    import pocket_vae

    torch.manual_seed(1)
    vae = AutoencoderKLWan(base_dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1)
    frame = torch.rand(2, 3, 1, 32, 32) * 2 - 1
    with torch.no_grad():
        mean, _ = pocket_vae.encode(vae, frame)
        assert (mean - vae.encode(frame).latent_dist.mean).abs().max() < 1e-4


def test_folded_padding_equals_512_rows():
    """One padded text row with a bias gives what diffusers computes over 512 rows."""
    import pocket_dit

    torch.manual_seed(2)
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=24, text_dim=32, freq_dim=64, ffn_dim=128, num_layers=2
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # zero biases would hide a fault
        latents, times = torch.randn(2, 16, 3, 8, 8), torch.tensor([900.0, 300.0])
        text, mask = torch.randn(2, 10, 32), torch.ones(2, 10, dtype=torch.long)
        mask[1, 4:] = 0
        padded = torch.zeros(2, 512, 32)
        padded[0, :10], padded[1, :4] = text[0], text[1, :4]
        theirs = model(latents, times, padded).sample
        ours = pocket_dit.forward(model, latents, times, text, mask)
    assert (theirs - ours).abs().max() < 1e-4
