"""Models of other libraries, converted and run as pipelines, equal the original, called micro-batch by micro-batch.

``MODELS[name]()`` returns a small model, without weights to download, and the arguments of a call: positional and by
keyword. ``./test`` tries those in ``SHORT``, ``tests/long python`` all.
"""

import copy
import random

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import gpipe
from conftest import long
from helpers import random_balance

pytestmark = pytest.mark.usefixtures("one_thread")
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
MAXVIT = {"input_size": (32, 32), "stem_channels": 8, "partition_size": 4, "block_channels": [8, 16], "head_dim": 8}
MAXVIT |= {"block_layers": [1, 1], "stochastic_depth_prob": 0.2, "num_classes": 5}
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
    "densenet121": lambda: torchvision(lambda models: models.densenet121(num_classes=5), *images(32)),
}


def parts_of(tree, chunks):
    """Returns the micro-batches of an object."""
    size = -(-samples_of(tree) // chunks)
    starts = range(0, samples_of(tree), size)
    return [tree_map(lambda leaf: leaf[i : i + size] if torch.is_tensor(leaf) else leaf, tree) for i in starts]


def samples_of(tree):
    return len(next(leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)))


def weighted_sum(output, _=None):
    """A loss that treats samples alike and elements differently."""
    total = 0.0
    for leaf in tree_leaves(output):
        if torch.is_tensor(leaf) and leaf.is_floating_point():
            rows = leaf.double().flatten(1)
            total = total + (rows * torch.linspace(-1, 1, rows.shape[1], dtype=torch.float64)).sin().sum()
    return total


def assert_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def assert_same_state(ours, theirs):
    """Compares gradients and buffers by name. The noise of a large sum is relative to the largest gradient."""
    mine, gradients = ({name: each.grad for name, each in module.named_parameters()} for module in (ours, theirs))
    largest = max(gradient.abs().max() for gradient in gradients.values() if gradient is not None)
    torch.testing.assert_close(mine, gradients, rtol=0, atol=1e-9 * float(largest))
    assert_equal(dict(ours.state_dict()), dict(theirs.state_dict()))


@pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in MODELS])
def test_a_model_equals_its_pipeline(name):
    torch.manual_seed(0)
    rng = random.Random(name)
    model, args, kwargs = MODELS[name]()
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # moves activations away from the kink of ReLU at 0
                parameter.add_(torch.rand_like(parameter), alpha=0.2)
    args, kwargs = tree_map(lambda x: x.double() if torch.is_tensor(x) and x.is_floating_point() else x, (args, kwargs))
    input = kwargs or (args[0] if len(args) == 1 else args)
    sequence = gpipe.to_sequential(model, *args, **kwargs)
    assert {id(tensor) for tensor in sequence.parameters()} == {id(tensor) for tensor in model.parameters()}
    plain = copy.deepcopy(model)

    # The unpartitioned sequence, with dropout: two steps.
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in (sequence, plain)]
    for _ in range(2):
        outputs = []
        for optimizer, call in zip(optimizers, (lambda: sequence(input), lambda: plain(*args, **kwargs)), strict=True):
            torch.manual_seed(1)
            optimizer.zero_grad()
            outputs.append(call())
            weighted_sum(outputs[-1]).backward()
        assert type(outputs[0]) is type(outputs[1])
        assert_equal(*map(tree_leaves, outputs))
        assert_same_state(sequence, plain)
        for optimizer in optimizers:
            optimizer.step()
    sequence.eval()
    plain.eval()
    with torch.no_grad():
        assert_equal(tree_leaves(sequence(input)), tree_leaves(plain(*args, **kwargs)))

    sequence.train()
    # A pipeline without dropout equals the original. Each schedule has its turn.
    norms = {path for path, module in model.named_modules() if "BatchNorm" in type(module).__name__}
    plain = copy.deepcopy(model)
    for tree in (plain, *(layer.model for layer in sequence)):
        for path, module in tree.named_modules():
            module.training = path in norms
    chunks = rng.choice([1, 3, 4])
    schedule = gpipe.SCHEDULES[list(MODELS).index(name) % len(gpipe.SCHEDULES)]
    per_worker = 2 if schedule.startswith(("interleaved", "looped")) else 1
    pipe = gpipe.GPipe(
        sequence,
        random_balance(rng, len(sequence), rng.choice([2, 4, 6]) * per_worker),
        chunks=chunks,
        checkpoint=rng.choice(["never", "except_last", "always"]),
        schedule=schedule,
        stages_per_worker=per_worker,
    )
    for module in (pipe, plain):
        module.zero_grad()
    outputs = [plain(*part[0], **part[1]) for part in parts_of((args, kwargs), chunks)]
    losses = [weighted_sum(output) for output in outputs]
    sum(losses).backward()
    target = torch.zeros(samples_of(input))
    loss, output = pipe.step(input, target, weighted_sum, reduction="sum", return_output=True)
    leaves = [each for each in zip(*map(tree_leaves, outputs), strict=True) if torch.is_tensor(each[0])]
    assert_equal([leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)], list(map(torch.cat, leaves)))
    assert_equal(loss, sum(losses))
    assert_same_state(pipe, plain)
    plain.load_state_dict(pipe.state_dict())
