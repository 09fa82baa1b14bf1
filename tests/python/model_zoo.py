"""Small configurations of the models of other libraries, without weights to download.

``MODELS[name]()`` returns a model and the arguments of a call: positional and by keyword. ``./test`` tries those in
``SHORT``, ``tests/long python`` all.
"""

import pytest
import torch

SAMPLES = 5


def images(size, samples=SAMPLES, channels=3):
    return (torch.rand(samples, channels, size, size),), {}


def tokens(**more):
    return (), {"input_ids": torch.randint(0, 50, (SAMPLES, 7)), **more}


def torchvision(make, *arguments):
    models = pytest.importorskip("torchvision").models
    return make(models), *(arguments or images(48))


def timm(name, **options):
    return pytest.importorskip("timm").create_model(name, num_classes=5, **options), *images(64, 3)


def transformers(kind, config, inputs, **options):
    library = pytest.importorskip("transformers")
    return getattr(library, kind)(getattr(library, config)(**options)), *inputs


def text_model(kind, config, inputs, **options):
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers(kind, config, inputs, **{**small, "intermediate_size": 32, **options})


def diffusers(kind, inputs, down, up, **options):
    library = pytest.importorskip("diffusers")
    small = {"sample_size": 8, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "norm_num_groups": 4}
    blocks = {"block_out_channels": (8, 16), "down_block_types": down, "up_block_types": up}
    model = getattr(library, kind)(**{**small, **blocks, **options})
    return model, (torch.rand(SAMPLES, 3, 8, 8), torch.arange(SAMPLES), *inputs), {}


def segmentation(kind):
    library = pytest.importorskip("segmentation_models_pytorch")
    small = {"encoder_weights": None, "encoder_depth": 3, "decoder_channels": (16, 8, 4), "classes": 3}
    return getattr(library, kind)("resnet18", **small), *images(32)


def monai(make, *sizes):
    nets = pytest.importorskip("monai.networks.nets")
    return make(nets), (torch.rand(SAMPLES, 1, *sizes),), {}


def unetr(nets):
    pytest.importorskip("einops")
    small = {"feature_size": 4, "hidden_size": 12, "mlp_dim": 16, "num_heads": 2, "spatial_dims": 2}
    return nets.UNETR(1, 2, (16, 16), dropout_rate=0.1, **small)


def swin_unetr(nets):
    small = {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "spatial_dims": 2}
    return nets.SwinUNETR(1, 2, drop_rate=0.1, **small)


def segresnet(nets):
    small = {"init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,), "in_channels": 1, "out_channels": 2}
    return nets.SegResNet(dropout_prob=0.2, **small)


def bottlenecks(models, layers):
    return models.ResNet(models.resnet.Bottleneck, layers, num_classes=5, width_per_group=8)


def deeplab(models):
    library = models.segmentation.deeplabv3
    backbone = models._utils.IntermediateLayerGetter(bottlenecks(models, [2, 1, 1, 1]), {"layer2": "out"})
    return library.DeepLabV3(backbone, library.DeepLabHead(512, 3))


def efficientnet(models):
    library = models.efficientnet
    blocks = [library.MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0), library.MBConvConfig(4, 3, 2, 8, 16, 2, 1.0, 1.0)]
    return library.EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.4, num_classes=5)


def convnext(models):
    library = models.convnext
    blocks = [library.CNBlockConfig(8, 16, 1), library.CNBlockConfig(16, None, 2)]
    return library.ConvNeXt(blocks, stochastic_depth_prob=0.4, num_classes=5)


VIT = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "num_classes": 5}
SWIN = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4], "num_classes": 5}
MAXVIT = {
    "input_size": (32, 32),
    "stem_channels": 8,
    "partition_size": 4,
    "block_channels": [8, 16],
    "block_layers": [1, 1],
    "head_dim": 8,
    "stochastic_depth_prob": 0.2,
    "num_classes": 5,
}
COATNET = {"img_size": 64, "embed_dim": (32,) * 4, "depths": (1,) * 4, "stem_width": (8, 8)}
GPT2 = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "use_cache": False}
SHORT = ["densenet", "gpt2", "t5"]
MODELS = {
    "squeezenet": lambda: torchvision(lambda models: models.SqueezeNet(num_classes=5)),
    "mobilenet": lambda: torchvision(lambda models: models.mobilenet_v3_small(num_classes=5)),
    "shufflenet": lambda: torchvision(lambda models: models.shufflenet_v2_x0_5(num_classes=5)),
    "regnet": lambda: torchvision(lambda models: models.regnet_y_400mf(num_classes=5)),
    "resnet50": lambda: torchvision(lambda models: bottlenecks(models, [3, 4, 6, 3]), *images(40)),
    # Returns auxiliary outputs in training mode.
    "googlenet": lambda: torchvision(lambda models: models.GoogLeNet(num_classes=5, init_weights=False)),
    "densenet": lambda: torchvision(lambda models: models.DenseNet(4, (2, 2), 8, num_classes=5)),
    "inception": lambda: torchvision(
        lambda models: models.inception_v3(num_classes=5, aux_logits=False, init_weights=False), *images(107, 2)
    ),
    "efficientnet": lambda: torchvision(efficientnet),
    "convnext": lambda: torchvision(convnext),
    "vit": lambda: torchvision(lambda models: models.VisionTransformer(**VIT), *images(16)),
    "swin": lambda: torchvision(lambda models: models.SwinTransformer(**SWIN), *images(32)),
    "maxvit": lambda: torchvision(lambda models: models.MaxVit(**MAXVIT), *images(32)),
    "deeplabv3": lambda: torchvision(deeplab, *images(32, 8)),
    "hrnet": lambda: timm("hrnet_w18_small"),
    "coatnet": lambda: timm("coatnet_pico_rw_224", **COATNET),
    "unet": lambda: segmentation("Unet"),
    "unet++": lambda: segmentation("UnetPlusPlus"),
    "unet 3-D": lambda: monai(lambda nets: nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=2), 8, 8, 8),
    "unetr": lambda: monai(unetr, 16, 16),
    "swin unetr": lambda: monai(swin_unetr, 64, 64),
    "segresnet": lambda: monai(segresnet, 8, 8, 8),
    "UNet2DModel": lambda: diffusers(
        "UNet2DModel", (), ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    ),
    "UNet2DConditionModel": lambda: diffusers(
        "UNet2DConditionModel",
        (torch.rand(SAMPLES, 5, 8),),
        ("DownBlock2D", "CrossAttnDownBlock2D"),
        ("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=8,
    ),
    "gpt2": lambda: transformers("GPT2LMHeadModel", "GPT2Config", tokens(), **GPT2),
    "bert": lambda: text_model(
        "BertForMaskedLM", "BertConfig", tokens(attention_mask=(torch.rand(SAMPLES, 7) > 0.2).long())
    ),
    "roberta": lambda: text_model("RobertaModel", "RobertaConfig", tokens()),
    "llama": lambda: text_model("LlamaForCausalLM", "LlamaConfig", tokens(), use_cache=False),
    "t5": lambda: transformers(
        "T5ForConditionalGeneration", "T5Config", tokens(decoder_input_ids=torch.randint(0, 50, (SAMPLES, 4))), **T5
    ),
    "hf vit": lambda: text_model("ViTModel", "ViTConfig", images(16), image_size=16, patch_size=8),
}
