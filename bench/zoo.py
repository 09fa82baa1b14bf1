"""Converts published models, without weights to download and at small sizes, and compares each with the original.

``python bench/zoo.py RESULTS.jsonl [WORD]`` runs each model with the word in its name in a process of its own. It adds a
line per model to the file, and leaves out the models that the file has. When all have run, it writes docs/zoo.md's tables.
"""

import dataclasses
import functools
import importlib
import json
import math
import multiprocessing
import re
import resource
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

import gpipe
from gpipe.verification import run_layers
from gpipe.wrapper import layers_in

SAMPLES = 4
VOCABULARY = 50
WAYS = "blocks", "native"
SECONDS, BYTES = 600, 10 << 30  # for one model
ROUNDING = 1e-6  # the largest difference, relative to the largest number, that the order of sums explains


def images(*sizes, channels=3):
    return torch.rand(SAMPLES, channels, *sizes)


def rand(*sizes):
    return lambda: torch.rand(SAMPLES, *sizes)


steps = functools.partial(torch.arange, SAMPLES)


def tokens():
    return torch.randint(3, VOCABULARY, (SAMPLES, 8))


def torchvision(name, sizes=(64, 64), **options):
    model = importlib.import_module("torchvision.models").get_model(name, weights=None, **options)
    return model, (images(*sizes),), {}


# Options by the beginning of a name.
TORCHVISION = {
    "googlenet": {"init_weights": False},
    "inception": {"init_weights": False, "aux_logits": False, "sizes": (107, 107)},
    "vit_": {"image_size": 64},
    "maxvit": {"sizes": (224, 224)},
    **dict.fromkeys(("deeplab", "fcn", "lraspp"), {"weights_backbone": None}),
    **dict.fromkeys(("mc3", "r2plus1d", "r3d", "swin3d"), {"sizes": (8, 64, 64)}),
    "s3d": {"sizes": (13, 209, 209)},
}
LARGE = ("vit_h_14", "regnet_y_128gf", "mvit_v1_b", "mvit_v2_s")  # left out: over 2 GB, or 70 Gflops per sample


def timm(name):
    library, size = importlib.import_module("timm"), TIMM_SIZES.get(name, 64)
    try:
        model = library.create_model(name, num_classes=10, img_size=size)
    except TypeError:  # takes images of any size
        model = library.create_model(name, num_classes=10)
    return model, (images(size, size),), {}


TIMM_SIZES = {"bat_resnext26ts": 256, "halonet26t": 256, "crossvit_9_240": 240, "efficientformer_l1": 224}
TIMM = """
bat_resnext26ts beit_base_patch16_224 botnet26t_256 caformer_s18 cait_xxs24_224 coat_lite_tiny coatnet_pico_rw_224
convit_tiny convmixer_768_32 convnext_atto convnextv2_atto cpubone_nano crossvit_9_240 cs3darknet_s csatv2 cspnext_tiny
cspresnet50 davit_tiny deit_tiny_distilled_patch16_224 densenet121 dla34 dpn48b eca_nfnet_l0 eca_resnext26ts ecaresnet26t
edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientnet_cc_b0_4e efficientvim_m1
efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0 fastvit_t8 focalnet_tiny_srf gcresnext26ts gcvit_xxtiny
gernet_s ghostnet_050 gmlp_ti16_224 halonet26t hardcorenas_a hgnetv2_b0 hiera_tiny_224 hrnet_w18_small iformer_t
inception_next_atto lambda_resnet26t lcnet_050 lcnetv2_small legacy_seresnet18 legacy_xception levit_128s lowformer_b0
mambaout_femto maxvit_pico_rw_256 mixer_s32_224 mnasnet_small mobilenetv2_035 mobilenetv3_small_050
mobilenetv4_conv_small mobileone_s0 mobilevit_xxs mobilevitv2_050 mvitv2_tiny nest_tiny nextvit_small nf_resnet26
pit_ti_224 poolformer_s12 pvt_v2_b0 rdnet_tiny regnetx_002 regnetz_b16 repghostnet_050 repvgg_a0 repvit_m0_9
res2net50_14w_8s resmlp_12_224 resnest14d resnet10t resnetv2_50x1_bit resnext26ts rexnet_100 samvit_base_patch16_224
selecsls42 sequencer2d_s shvit_s1 skresnet18 starnet_s1 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_ns_224
swinv2_tiny_window8_256 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m twins_svt_small vgg11_bn visformer_tiny
vit_relpos_small_patch16_224 vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 vovnet39a xception41
xcit_nano_12_p16_224
"""

# The sizes of transformers' models, under all the names that configurations have for them.
SIZES = {
    32: "hidden_size d_model n_embd dim emb_dim embedding_size n_positions max_position_embeddings output_hidden_size",
    64: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim dff n_inner hidden_dim ffn_hidden_size image_size",
    16: "moe_intermediate_size shared_expert_intermediate_size block_size d_inner num_conv_pos_embeddings",
    8: "head_dim d_kv d_head attention_head_size rotary_dim patch_size query_pre_attn_scalar",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_experts num_local_experts num_conv_pos_embedding_groups",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_key_value_heads num_kv_heads num_experts_per_tok eos_token_id",
    1: "bos_token_id decoder_start_token_id",
    0: "pad_token_id layerdrop encoder_layerdrop decoder_layerdrop mask_time_prob use_cache apply_spec_augment",
    VOCABULARY: "vocab_size",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
SHORT = {"depths": 1, "conv_dim": 32, "image_size": 64}  # the elements of lists


def transformers(kind, head, inputs, **options):
    library = importlib.import_module("transformers")
    config = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING[kind]
    small = {}
    for name, default in ((field.name, field.default) for field in dataclasses.fields(config)):
        if isinstance(default, (list, tuple)):
            if name in SHORT:
                small[name] = [SHORT[name]] * len(default)
        elif name in SMALL:
            small[name] = type(default)(SMALL[name]) if isinstance(default, (bool, float)) else SMALL[name]
    model = getattr(library, f"AutoModel{head and 'For' + head}").from_config(config(**{**small, **options}))
    return model, (), {name: make() for name, make in inputs.items()}


INPUTS = {
    "input_ids": {"input_ids": tokens},
    "pair": {"input_ids": tokens, "attention_mask": lambda: torch.ones(SAMPLES, 8).long(), "decoder_input_ids": tokens},
    "pixel_values": {"pixel_values": rand(3, 64, 64)},
    "frames": {"pixel_values": rand(2, 3, 64, 64)},
    "input_values": {"input_values": rand(2000)},
    "past_values": {"past_values": rand(32, 1)},
}
# Types of transformers' models by what they are given and compute.
TRANSFORMERS = {
    ("MaskedLM", "input_ids"): """albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra
        ernie esm fnet layoutlm longformer megatron-bert mobilebert modernbert mpnet nystromformer rembert roberta
        roberta-prelayernorm roformer squeezebert xlm xlm-roberta xmod""",
    ("CausalLM", "input_ids"): """biogpt bloom codegen cohere ctrl falcon gemma gemma2 gemma3_text glm gpt2 gpt_bigcode gpt_neo
        gpt_neox gpt_oss gptj granite helium jetmoe llama mamba mistral mixtral mpt nemotron olmo olmo2 openai-gpt opt
        persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe rwkv smollm3 stablelm starcoder2 xglm xlnet""",
    ("Seq2SeqLM", "pair"): """bart blenderbot longt5 m2m_100 marian mbart mt5 pegasus plbart prophetnet
        switch_transformers t5 umt5""",
    ("ImageClassification", "pixel_values"): """beit bit convnext convnextv2 cvt data2vec-vision dinov2
        dinov2_with_registers efficientnet focalnet hgnet_v2 ijepa mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2
        poolformer pvt pvt_v2 regnet resnet segformer swiftformer swin swinv2 vit vit_msn""",
    ("", "pixel_values"): "clip_vision_model deit dinov3_vit hiera levit siglip_vision_model vit_mae yolos",
    ("", "input_ids"): "clip_text_model",
    ("VideoClassification", "frames"): "timesformer videomae vivit",
    ("CTC", "input_values"): "data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm",
    ("", "past_values"): "patchtsmixer patchtst",
}
OPTIONS = {
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "levit": {"patch_size": 16},
    **dict.fromkeys(("mobilevit", "mobilevitv2"), {"patch_size": 2}),
    "swin": {"patch_size": 4, "window_size": 2},
    "swinv2": {"patch_size": 4, "window_size": 4},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    **dict.fromkeys(("timesformer", "videomae"), {"num_frames": 2}),
    "vivit": {"num_frames": 2, "tubelet_size": [2, 8, 8]},
    "xlnet": {"use_mems_eval": False},
    "xmod": {"default_language": "en_XX"},
}


def diffusers(kind, inputs, **options):
    return getattr(importlib.import_module("diffusers"), kind)(**options), (), {name: make() for name, make in inputs.items()}


def blocks(down, up, **options):
    return {"down_block_types": down, "up_block_types": up, "block_out_channels": (8, 16), "norm_num_groups": 4, **options}


VAE = blocks(("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2)
ASYMMETRIC = {"down_block_out_channels": (8, 16), "up_block_out_channels": (8, 16), "norm_num_groups": 4}
OOBLECK = {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2]}
CROSS = blocks(("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D"), layers_per_block=1)
CROSS |= {"cross_attention_dim": 16, "attention_head_dim": 4}
CROSS_3D = CROSS | {"down_block_types": ("DownBlock3D", "CrossAttnDownBlock3D")}
CROSS_3D |= {"up_block_types": ("CrossAttnUpBlock3D", "UpBlock3D")}
CONTROL = {name: option for name, option in CROSS.items() if name != "up_block_types"}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
DIT = {**HEADS, "sample_size": 8, "num_layers": 2}
JOINT = {"joint_attention_dim": 16, "caption_projection_dim": 16}
SANA = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16}
COG = {"sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 5, "time_embed_dim": 16}
WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32}
IMAGE = {"sample": rand(3, 16, 16)}
TEXT = {"encoder_hidden_states": rand(5, 16)}
SAMPLE = {"sample": rand(4, 8, 8), "timestep": steps, **TEXT}
NOISY = {"hidden_states": rand(4, 8, 8), "timestep": steps}
DIFFUSERS = {
    "UNet1DModel": ({"sample": rand(2, 32), "timestep": steps}, {"extra_in_channels": 64}),
    "UNet2DModel": (
        {"sample": rand(3, 8, 8), "timestep": steps},
        blocks(("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D"), layers_per_block=1),
    ),
    "UNet2DConditionModel": (SAMPLE, CROSS),
    "UNet3DConditionModel": (SAMPLE | {"sample": rand(4, 2, 8, 8)}, CROSS_3D),
    "ControlNetModel": (SAMPLE | {"controlnet_cond": rand(3, 64, 64)}, CONTROL),
    "AutoencoderKL": (IMAGE, VAE),
    "AsymmetricAutoencoderKL": (IMAGE, ASYMMETRIC | {name: VAE[name] for name in ("down_block_types", "up_block_types")}),
    "AutoencoderTiny": (IMAGE, dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (8,) * 4)),
    "VQModel": (IMAGE, {**VAE, "num_vq_embeddings": 8}),
    "AutoencoderOobleck": ({"sample": rand(2, 64)}, {**OOBLECK, "decoder_channels": 8, "decoder_input_channels": 4}),
    "DiTTransformer2DModel": ({**NOISY, "class_labels": steps}, {**DIT, "norm_num_groups": 4, "num_embeds_ada_norm": 10}),
    "PixArtTransformer2DModel": (
        {**NOISY, **TEXT},
        {**DIT, "cross_attention_dim": 16, "caption_channels": 16, "use_additional_conditions": False},
    ),
    "SD3Transformer2DModel": (
        {**NOISY, **TEXT, "pooled_projections": rand(16)},
        {**DIT, **JOINT, "in_channels": 4, "pooled_projection_dim": 16, "pos_embed_max_size": 8},
    ),
    "SanaTransformer2DModel": ({**NOISY, **TEXT}, {**DIT, **SANA, "in_channels": 4}),
    "AuraFlowTransformer2DModel": (
        {**NOISY, **TEXT},
        {**HEADS, **JOINT, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "sample_size": 8, "pos_embed_max_size": 16},
    ),
    "PriorTransformer": (
        {"hidden_states": rand(16), "timestep": steps, "proj_embedding": rand(16), **TEXT},
        {**HEADS, "num_layers": 2, "embedding_dim": 16, "num_embeddings": 5},
    ),
    "Transformer2DModel": ({"hidden_states": rand(16, 8, 8)}, {**HEADS, "in_channels": 16, "norm_num_groups": 4}),
    "CogVideoXTransformer3DModel": (
        {"hidden_states": rand(2, 4, 8, 8), "timestep": steps, **TEXT},
        {**HEADS, **COG, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 16},
    ),
    "WanTransformer3DModel": (
        {"hidden_states": rand(4, 2, 8, 8), "timestep": steps, **TEXT},
        {**WAN, "in_channels": 4, "out_channels": 4},
    ),
}


def monai(kind, sizes=(32, 32), arguments=1, **options):
    model = getattr(importlib.import_module("monai.networks.nets"), kind)(**options)
    return model, tuple(images(*sizes, channels=1) for _ in range(arguments)), {}


FLAT = {"spatial_dims": 2, "in_channels": 1}
LEVELS = {"channels": (4, 8, 16), "strides": (2, 2)}
TO_TWO = {**FLAT, "out_channels": 2}
PATCHES = {"in_channels": 1, "img_size": (32, 32), "spatial_dims": 2, "hidden_size": 16, "mlp_dim": 32, "num_heads": 2}
VIT = {**PATCHES, "patch_size": (8, 8), "num_layers": 2}
MAE = {"decoder_hidden_size": 16, "decoder_mlp_dim": 32, "decoder_num_layers": 1, "decoder_num_heads": 2}
DYNAMIC = {"kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [4, 8, 8]}
RESNET = {"block": "basic", "layers": [1] * 4, "block_inplanes": [4, 4, 8, 8], "n_input_channels": 1, "num_classes": 3}
VQ = {"num_res_layers": 1, "num_res_channels": (4, 8), "downsample_parameters": ((2, 4, 1, 1),) * 2, "embedding_dim": 4}
KL = {"channels": (8, 8), "num_res_blocks": 1, "attention_levels": (False, True), "norm_num_groups": 4}
VARIATIONAL = {"spatial_dims": 2, "in_shape": (1, 32, 32), "out_channels": 1, "latent_size": 4, "strides": (2, 2, 1)}
MONAI = {
    "AHNet": TO_TWO | {"layers": (1, 1, 1, 1), "sizes": (128, 128)},
    "AttentionUnet": TO_TWO | LEVELS,
    "AutoencoderKL": FLAT | KL,
    "BasicUNet": TO_TWO | {"features": (4, 4, 8, 8, 16, 4)},
    "BasicUNetPlusPlus": TO_TWO | {"features": (4, 4, 8, 8, 16, 4)},
    "Classifier": LEVELS | {"in_shape": (1, 32, 32), "classes": 3},
    "Critic": LEVELS | {"in_shape": (1, 32, 32)},
    "DenseNet": TO_TWO | {"init_features": 8, "growth_rate": 4, "block_config": (2, 2)},
    "Discriminator": LEVELS | {"in_shape": (1, 32, 32)},
    "DynUNet": TO_TWO | DYNAMIC,
    "FlexibleUNet": {"in_channels": 1, "out_channels": 2, "backbone": "efficientnet-b0", "sizes": (64, 64)},
    "Generator": {"latent_shape": (1, 32, 32), "start_shape": (4, 4, 4), "channels": (4, 1), "strides": (2, 2)},
    "HighResNet": TO_TWO,
    "MaskedAutoEncoderViT": VIT | MAE,
    "MedNeXt": TO_TWO | {"init_filters": 4, "blocks_down": (1,) * 4, "blocks_bottleneck": 1, "blocks_up": (1,) * 4},
    "PatchDiscriminator": FLAT | {"channels": 8},
    "Quicknat": {"num_classes": 2, "num_filters": 8},
    "RegUNet": TO_TWO | {"num_channel_initial": 4, "depth": 2},
    "Regressor": LEVELS | {"in_shape": (1, 32, 32), "out_shape": (2,)},
    "ResNet": RESNET | {"spatial_dims": 2},
    "SegResNet": TO_TWO | {"init_filters": 8, "dropout_prob": 0.2},
    "SegResNetDS": TO_TWO | {"init_filters": 8},
    "SegResNetVAE": TO_TWO | {"input_image_size": (32, 32), "vae_nz": 8},
    "SwinUNETR": TO_TWO | {"feature_size": 12, "num_heads": (1, 1, 2, 2), "sizes": (64, 64)},
    "UNet": TO_TWO | LEVELS | {"num_res_units": 2},
    "UNETR": PATCHES | {"out_channels": 2, "feature_size": 4},
    "VarAutoEncoder": LEVELS | VARIATIONAL | {"use_mean_at_inference": True},  # else evaluation mode fails
    "ViT": VIT | {"classification": True},
    "ViTAutoEnc": VIT | {"patch_size": (4, 4)},
    "VNet": TO_TWO | {"dropout_dim": 2},
    "VoxelMorph": {"spatial_dims": 2, "arguments": 2, "half_res": False},
    "VQVAE": FLAT | VQ | {"out_channels": 1, "channels": (4, 8), "upsample_parameters": ((2, 4, 1, 1, 0),) * 2},
}


def segmentation(kind):
    library = importlib.import_module("segmentation_models_pytorch")
    return getattr(library, kind)("resnet18", encoder_weights=None, classes=3), (images(128, 128),), {}


SEGMENTATION = "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus PAN UPerNet Segformer".split()


def models():
    """Returns functions by name that make a model and the arguments of a call: positional and by keyword. The first word of
    a name is the library."""
    found = {}

    def add(library, name, make, *arguments, **options):
        found[f"{library} {name}"] = functools.partial(make, *arguments, **options)

    vision = importlib.import_module("torchvision.models")
    for module in (vision, vision.segmentation, vision.video):
        for name in vision.list_models(module):
            if name not in LARGE:
                options = (given for begin, given in TORCHVISION.items() if name.startswith(begin))
                add("torchvision", name, torchvision, name, **next(options, {}))
    for name in TIMM.split():
        add("timm", name, timm, name)
    for (head, inputs), kinds in TRANSFORMERS.items():
        for kind in kinds.split():
            add("transformers", kind, transformers, kind, head, INPUTS[inputs], **OPTIONS.get(kind, {}))
    for kind, (inputs, options) in DIFFUSERS.items():
        add("diffusers", kind, diffusers, kind, inputs, **options)
    for kind, options in MONAI.items():
        add("MONAI", kind, monai, kind, **options)
    for kind in SEGMENTATION:
        add("segmentation_models_pytorch", kind, segmentation, kind)
    return found


def samples_of(tree):
    return len(next(leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)))


def input_of(args, kwargs):
    """Returns the input of a sequence that is converted for these arguments."""
    return kwargs or (args[0] if len(args) == 1 else args)


def weighted_sum(output, _=None):
    """A loss that treats samples alike and elements differently."""
    leaves = [leaf.double().flatten(1) for leaf in tree_leaves(output) if torch.is_tensor(leaf) and leaf.is_floating_point()]
    return sum((rows * torch.linspace(-1, 1, rows.shape[1], dtype=torch.float64)).sin().sum() for rows in leaves)


def backward(loss, output):
    """Returns a loss, after its backward, and the tensors of the output."""
    if not loss.isfinite():
        raise ValueError("the loss is not finite")
    loss.backward()
    return [loss, *tree_leaves(output)]


def state_after(model, step):
    """Returns the outputs, the gradients and the buffers after a training step. Then the buffers are as before."""
    tables = [each._buffers for each in model.modules()]
    before = [(table, name, each, each.clone()) for table in tables for name, each in table.items() if each is not None]
    torch.manual_seed(1)
    model.zero_grad()
    outputs = [leaf.detach() for leaf in step() if torch.is_tensor(leaf)]
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for table, name, buffer, value in before:  # the step may have replaced one
            table[name] = buffer.copy_(value)
    return dict(enumerate(outputs)), gradients, buffers


def difference(ours, theirs):
    """Returns the largest difference of two states, relative to the largest output, gradient or buffer; 0 if all bits are
    equal; infinity if one is finite where the other is not."""
    largest = 0.0
    for mine, others in zip(ours, theirs, strict=True):
        assert {name: each.shape for name, each in mine.items()} == {name: each.shape for name, each in others.items()}
        pairs = [(mine[name].double(), others[name].double()) for name in mine if not torch.equal(mine[name], others[name])]
        if any(not torch.equal(one.isfinite(), other.isfinite()) for one, other in pairs):
            return math.inf
        if pairs:
            scale = max(float(each.double().nan_to_num(0, 0, 0).abs().max()) for each in others.values() if each.numel())
            differences = [(one - other).nan_to_num(0, 0, 0).abs().max() / scale for one, other in pairs]
            largest = max(largest, *map(float, differences))
    return largest


def compare(model, args, kwargs, sequence, chunks, **options):
    """Returns how a model in training mode differs from its sequence, and how a pipeline with these options differs from the
    sequence's layers, run on each micro-batch."""
    input = input_of(args, kwargs)

    def on(module, *args, **kwargs):
        output = module(*args, **kwargs)
        return backward(weighted_sum(output), output)

    of_sequence = difference(*(state_after(model, step) for step in (
        lambda: on(sequence, input), lambda: on(model, *args, **kwargs),
    )))  # fmt: skip
    pipe = gpipe.GPipe(sequence, chunks=chunks, **options)

    def by_pipeline():
        total = gpipe.Loss(weighted_sum, reduction="sum")
        return tree_leaves(pipe.step(input, torch.zeros(samples_of(input)), total, return_output=True))

    return of_sequence, difference(*(state_after(model, step) for step in (
        by_pipeline, lambda: on(run_layers, layers_in(sequence).values(), sequence.entering(input), chunks),
    )))  # fmt: skip


def write(file, name, found):
    with open(file, "a") as lines:
        lines.write(json.dumps({"name": name, **found}) + "\n")


def record(name, file):
    """Adds a line about a model to a file: for each way to convert it, two differences or an error."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for way in WAYS:
        torch.manual_seed(0)
        signal.alarm(SECONDS)
        try:
            model, args, kwargs = models()[name]()
            sequence = gpipe.to_sequential(model.train(), *args, native=way == "native", **kwargs)
            half = len(sequence) // 2
            found[way] = compare(model, args, kwargs, sequence, balance=[half, len(sequence) - half], chunks=2)
        except Exception as error:
            found[way] = f"{type(error).__name__}: {error}".splitlines()[0]
    write(file, name, found)


def tables_of(results):
    """Returns the tables of docs/zoo.md: the number of models that are equal, and the models that are refused or differ."""
    libraries = sorted({name.split()[0] for name in results}) + [""]
    counts, others = [], {}
    for library in libraries:
        chosen = [each for name, each in results.items() if name.startswith(library)]
        row = [library or "**all**", str(len(chosen))]
        for way in WAYS:
            found = [each[way] for each in chosen if not isinstance(each[way], str)]
            row += [str(sum(max(each) < ROUNDING for each in found)), str(sum(each[0] == 0 for each in found))]
        counts.append(row)
    for name, each in results.items():
        for way in WAYS:
            if isinstance(each[way], str) or max(each[way]) >= ROUNDING:
                what = each[way] if isinstance(each[way], str) else f"differs by {max(each[way]):.0e}"
                others.setdefault((way, what.replace("|", "/")), []).append(name)
    columns = ["library", "models", *(f"{what}, {way}" for way in WAYS for what in ("equal", "bit-equal"))]
    rows = [[way, ", ".join(names), what] for (way, what), names in others.items()]
    return {"counts": table([columns, *counts]), "exceptions": table([["layers", "models", "what happens"], *rows])}


def table(rows):
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join([lines[0], "|" + "---|" * len(rows[0]) + "\n", *lines[1:]])


def main(file, word=""):
    def results():
        lines = Path(file).read_text().splitlines() if Path(file).exists() else []
        return {each["name"]: each for each in map(json.loads, lines)}

    for name in models():
        if word in name and name not in results():
            process = multiprocessing.get_context("fork").Process(target=record, args=(name, file))
            process.start()
            process.join()
            if process.exitcode:
                write(file, name, dict.fromkeys(WAYS, f"the process ended with {process.exitcode}"))
    if results().keys() >= models().keys():
        found = tables_of({name: each for name, each in results().items() if name in models()})
        page = Path(__file__).parents[1] / "docs" / "zoo.md"
        places = r"(<!-- table (\w+) -->)\n.*?(<!-- end -->)"
        filled = re.sub(places, lambda place: f"{place[1]}\n\n{found[place[2]]}\n{place[3]}", page.read_text(), flags=re.DOTALL)
        page.write_text(filled)


if __name__ == "__main__":
    main(*sys.argv[1:])
