"""Public models and optimizers, trained for a few steps: the rows of the second table of ``docs/parity.md``.

A row is a package, a name and what it is made of; ``ROWS`` holds them all. Models are built from configurations, most
of a few thousand parameters, and nothing is downloaded. ``compare`` trains one row on the
calling rank under ``ddp`` and under each stage, and says how far apart they are.

The packages are the extra ``models``. torchvision's wheel on PyPI is compiled for CUDA; its Python part, which is all
that the rows need, is installed beside the environment (see ``PYTHON_ONLY``) and found through :func:`find_packages`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from tests.helpers import zoo

PYTHON_ONLY = Path(sys.prefix) / "python-only"
"""Where ``make models`` puts packages of which only the Python part can be imported here."""
NUM_STEPS = 6
STAGES = (1, 2, 3)
TOLERANCE = 1e-5

Batch = Any
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Row:
    """One model under one optimizer."""

    package: str
    """The distribution it comes from."""
    name: str
    model: Make
    batch: Callable[[], Batch]
    """Draws one micro-batch: positional arguments as a tuple, keywords as a dict."""
    optimizer: Callable[[nn.Module], Any]
    tolerance: float = TOLERANCE
    mean_loss: bool = False
    """``ddp`` has the mean of all ranks' losses for values, with its own gradients: what stages give to optimizers."""
    reason: str = ""
    """Why the tolerance is another one, or the reference."""

    @property
    def key(self) -> str:
        return f"{self.package}/{self.name}"


ROWS: dict[str, Row] = {}


def row(package: str, name: str, model: Make, batch: Callable[[], Batch], optimizer: Any = None, **more: Any) -> None:
    """Adds a row; without an ``optimizer`` it is AdamW."""
    new = Row(package, name, model, batch, optimizer or _adamw, **more)
    assert new.key not in ROWS, new.key
    ROWS[new.key] = new


def rows(package: str, names: str | Iterable[str], make: Callable[[str], Make], batch: Any, **more: Any) -> None:
    """Adds a row for each of ``names``."""
    for name in names.split() if isinstance(names, str) else names:
        row(package, name, make(name), batch, **more)


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Packages
# ---------------------------------------------------------------------------------------------------------------------


def find_packages() -> None:
    """Makes importable what ``make models`` has installed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if PYTHON_ONLY.is_dir() and str(PYTHON_ONLY) not in sys.path:
        sys.path.append(str(PYTHON_ONLY))
        if (PYTHON_ONLY / "torchvision").is_dir():
            _declare_torchvision()


@functools.cache
def _declare_torchvision() -> Any:
    """Its Python part describes two compiled operators when it is imported, so they have to be declared."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # whoever drops it takes them back


def version_of(package: str) -> str:
    """The installed version, or ``""``. Leaves the path alone: ranks take it over, and import Lightning first."""
    wanted = package.lower().replace("_", "-")
    try:
        found = distributions(path=[*sys.path, str(PYTHON_ONLY)])
        return next((d.version for d in found if (d.metadata["Name"] or "").lower().replace("_", "-") == wanted), "")
    except PackageNotFoundError:
        return ""


def _get(path: str) -> Any:
    """``"package.module:name"``, imported when it is needed."""
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def of(path: str, *args: Any, **kwargs: Any) -> Make:
    """Calls ``package.module:name`` when the model is built."""
    return lambda: _get(path)(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------

VOCABULARY = 64


def images(size: int = 32, channels: int = 3, batch: int = 2) -> Callable[[], Batch]:
    return lambda: (torch.randn(batch, channels, size, size),)


def tokens(length: int = 8, vocabulary: int = VOCABULARY) -> Batch:
    return {"input_ids": torch.randint(3, vocabulary, (2, length))}


def labelled() -> Batch:
    ids = torch.randint(3, VOCABULARY, (2, 8))
    return {"input_ids": ids, "labels": ids}


def seq2seq() -> Batch:
    return {"input_ids": torch.randint(3, VOCABULARY, (2, 8)), "labels": torch.randint(3, VOCABULARY, (2, 6))}


def pixels(size: int = 32, channels: int = 3) -> Callable[[], Batch]:
    return lambda: {"pixel_values": torch.randn(2, channels, size, size)}


def graph() -> Batch:
    """Twelve nodes of 16 features, a ring with chords."""
    nodes = torch.arange(12)
    edges = torch.stack([nodes.repeat(2), torch.cat([(nodes + 1) % 12, (nodes + 5) % 12])])
    return torch.randn(12, 16), edges


# ---------------------------------------------------------------------------------------------------------------------
# transformers
# ---------------------------------------------------------------------------------------------------------------------

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "d_model": 16, "n_embd": 16, "dim": 16, "embedding_size": 16,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32, "ffn_dim": 32, "d_ff": 32,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "n_inner": 32, "hidden_dim": 32, "max_position_embeddings": 32,
    "n_positions": 32, "head_dim": 8, "d_kv": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "image_size": 32, "patch_size": 8, "rotary_dim": 4,
}  # fmt: skip


def huggingface(auto: str, kind: str, **more: Any) -> Make:
    """``transformers.<auto>`` from the tiniest configuration of ``kind``."""

    def make() -> nn.Module:
        from transformers import CONFIG_MAPPING

        cls = CONFIG_MAPPING[kind]
        known = cls().to_dict()
        settings = {key: value for key, value in _SIZES.items() if key in known}
        config = cls(**{**settings, **more})
        config._attn_implementation = "eager"
        return _get(f"transformers:{auto}").from_config(config)

    return make


def _causal(kind: str) -> Make:
    return huggingface("AutoModelForCausalLM", kind)


def _masked(kind: str) -> Make:
    return huggingface("AutoModelForMaskedLM", kind)


rows("transformers", "gpt2 gpt_neox gptj opt bloom biogpt", _causal, labelled)
rows("transformers", "llama mistral mixtral gemma gemma2 gemma3_text qwen2 qwen3 qwen2_moe", _causal, labelled)
rows("transformers", "phi phi3 olmo olmo2 stablelm starcoder2 cohere granite helium glm glm4", _causal, labelled)
rows("transformers", "persimmon falcon smollm3 nemotron mamba xglm ctrl openai-gpt seed_oss", _causal, labelled)
rows("transformers", "granitemoe ernie4_5 exaone4 apertus arcee hunyuan_v1_dense lfm2", _causal, labelled)
rows("transformers", "bert roberta electra albert distilbert camembert ernie mpnet", _masked, labelled)
rows("transformers", "deberta deberta-v2 roformer rembert layoutlm megatron-bert modernbert", _masked, labelled)
rows("transformers", "xlm-roberta roberta-prelayernorm convbert esm mobilebert fnet nystromformer", _masked, labelled)
rows(
    "transformers",
    "bart t5 mbart pegasus marian blenderbot mvp plbart",
    lambda k: huggingface("AutoModelForSeq2SeqLM", k, decoder_start_token_id=1),
    seq2seq,
)
rows("transformers", "vit deit beit dinov2 vit_msn", lambda k: huggingface("AutoModel", k), pixels())
row(
    "transformers",
    "resnet",
    huggingface("AutoModel", "resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    pixels(),
)
row(
    "transformers",
    "swin",
    huggingface("AutoModel", "swin", embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4, patch_size=4),
    pixels(),
)
row(
    "transformers",
    "gpt_neo",
    huggingface("AutoModelForCausalLM", "gpt_neo", attention_types=[[["global", "local"], 1]]),
    labelled,
)
row("transformers", "codegen", huggingface("AutoModelForCausalLM", "codegen", n_head=4), labelled)
row(
    "transformers",
    "wav2vec2",
    huggingface(
        "AutoModel",
        "wav2vec2",
        conv_dim=[8, 8],
        conv_kernel=[10, 8],
        conv_stride=[5, 4],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        mask_time_prob=0.0,
    ),
    lambda: (torch.randn(2, 800),),
)
row("transformers", "whisper", huggingface("AutoModel", "whisper", num_mel_bins=8, max_source_positions=16),
    lambda: {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": tokens(4)["input_ids"]},
    tolerance=5e-5,
    reason="both layers of the decoder and the loss use the encoder's output; a unit gathers its layer's part of the "
    "gradient first, so the five terms are added in another order. `units=[]` is equal to the bit")  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# peft: adapters on a GPT-2
# ---------------------------------------------------------------------------------------------------------------------


def adapted(config: str, **settings: Any) -> Make:
    def make() -> nn.Module:
        peft = _get("peft")
        return peft.get_peft_model(_causal("llama")(), getattr(peft, config)(task_type="CAUSAL_LM", **settings))

    return make


_TARGETS = {"target_modules": ["q_proj", "v_proj"]}
row("peft", "LoRA", adapted("LoraConfig", r=4, lora_dropout=0.1, **_TARGETS), labelled)
row("peft", "DoRA", adapted("LoraConfig", r=4, use_dora=True, **_TARGETS), labelled)
row("peft", "rsLoRA, biases", adapted("LoraConfig", r=4, use_rslora=True, bias="all", **_TARGETS), labelled)
row("peft", "LoHa", adapted("LoHaConfig", r=4, **_TARGETS), labelled)
row("peft", "LoKr", adapted("LoKrConfig", r=4, **_TARGETS), labelled)
row("peft", "AdaLoRA", adapted("AdaLoraConfig", target_r=2, init_r=4, total_step=100, **_TARGETS), labelled)
row("peft", "IA3", adapted("IA3Config", **_TARGETS, feedforward_modules=[]), labelled)
row("peft", "OFT", adapted("OFTConfig", r=0, oft_block_size=4, **_TARGETS), labelled)
row("peft", "VeRA", adapted("VeraConfig", r=4, **_TARGETS), labelled)
row("peft", "FourierFT", adapted("FourierFTConfig", n_frequency=20, **_TARGETS), labelled)
row("peft", "BOFT", adapted("BOFTConfig", boft_block_size=4, **_TARGETS), labelled)
row("peft", "HRA", adapted("HRAConfig", r=4, **_TARGETS), labelled)
row("peft", "LN tuning", adapted("LNTuningConfig", target_modules=["input_layernorm"]), labelled)
row("peft", "prompt tuning", adapted("PromptTuningConfig", num_virtual_tokens=4), labelled)
row("peft", "prefix tuning", adapted("PrefixTuningConfig", num_virtual_tokens=4), labelled)
row("peft", "P-tuning", adapted("PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=16), labelled)

# ---------------------------------------------------------------------------------------------------------------------
# Vision
# ---------------------------------------------------------------------------------------------------------------------


def _timm(name: str, **more: Any) -> Make:
    return of("timm:create_model", name, num_classes=8, **more)


rows(
    "timm",
    "test_byobnet test_convnext test_convnext2 test_convnext3 test_efficientnet test_efficientnet_ln",
    _timm,
    images(64),
)
rows("timm", "test_efficientnet_gn test_efficientnet_evos test_mambaout test_nfnet test_resnet", _timm, images(64))
rows("timm", "test_vit test_vit2 test_vit3 test_vit4", lambda n: _timm(n, img_size=32), images(32))
rows("timm", "mobilenetv3_small_050 lcnet_050 tinynet_e semnasnet_050", _timm, images(64))
rows(
    "torchvision",
    "squeezenet1_1 mobilenet_v3_small shufflenet_v2_x0_5 mnasnet0_5",
    lambda n: of(f"torchvision.models:{n}", num_classes=4),
    images(64),
)
rows(
    "segmentation-models-pytorch",
    "Unet Linknet PSPNet",
    lambda n: of(
        f"segmentation_models_pytorch:{n}", "timm-mobilenetv3_small_minimal_100", encoder_weights=None, classes=2
    ),
    images(64),
)
row(
    "open_clip_torch",
    "CLIP",
    of(
        "open_clip:CLIP",
        16,
        {"image_size": 32, "patch_size": 8, "layers": 2, "width": 16, "head_width": 8},
        {"context_length": 8, "vocab_size": VOCABULARY, "width": 16, "heads": 2, "layers": 2},
    ),
    lambda: (torch.randn(2, 3, 32, 32), torch.randint(1, VOCABULARY, (2, 8))),
)

# ---------------------------------------------------------------------------------------------------------------------
# Diffusion, graphs
# ---------------------------------------------------------------------------------------------------------------------


def noisy(size: int = 16) -> Batch:
    return torch.randn(2, 3, size, size), torch.randint(0, 1000, (2,))


row(
    "diffusers",
    "UNet2DConditionModel",
    of(
        "diffusers:UNet2DConditionModel",
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=8,
    ),
    lambda: (*noisy(), torch.randn(2, 4, 8)),
)
row(
    "diffusers",
    "SD3Transformer2DModel",
    of(
        "diffusers:SD3Transformer2DModel",
        sample_size=8,
        patch_size=2,
        in_channels=3,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=3,
        pos_embed_max_size=8,
    ),
    lambda: {
        "hidden_states": torch.randn(2, 3, 8, 8),
        "encoder_hidden_states": torch.randn(2, 4, 8),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.randint(0, 1000, (2,)),
    },
)


rows(
    "torch-geometric",
    "GCN GraphSAGE GIN GAT EdgeCNN",
    lambda n: of(f"torch_geometric.nn.models:{n}", 16, 8, 3),
    graph,
)

# ---------------------------------------------------------------------------------------------------------------------
# Optimizers, on one small network
# ---------------------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Matrices of several shapes, one square and one of 4,096 elements, vectors, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(1)
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x) - 1).square().mean()


def network(package: str, name: str, path: str, *, grouped: dict[str, Any] | None = None, **settings: Any) -> None:
    """The row of the optimizer at ``path``; ``grouped`` are settings of the group that holds the matrices."""
    more = {key: settings.pop(key) for key in ("tolerance", "reason") if key in settings}

    def optimizer(model: nn.Module) -> Any:
        params = list(model.parameters())
        if grouped is None:
            return _training(_get(path)(params, **settings))
        rest = {"params": [p for p in params if p.dim() != 2]}
        return _get(path)([{"params": [p for p in params if p.dim() == 2], **grouped}, rest], **settings)

    row(package, name, Network, images(4, 1), optimizer, **more)


def around(package: str, name: str, path: str, **settings: Any) -> None:
    """The row of an optimizer around an AdamW."""

    def optimizer(model: nn.Module) -> Any:
        return _training(_get(path)(AdamW(model.parameters(), lr=1e-2, eps=1e-4), **settings))

    row(package, name, Network, images(4, 1), optimizer)


def _training(optimizer: Any) -> Any:
    """Schedule-free ones ask to be told."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


BY_LOSS = (
    "it goes as far as the loss says. Under DDP each rank goes by its own loss, and the weights of ranks part; here it"
    " goes by the mean of all ranks' losses, and is compared with DDP whose losses have that value"
)
for _name in (
    "a2grad accsgd adabelief adabound adagc adai adalite adam adamc adamg adamod adamp adams"
    " adamwsn adan adanorm adapnm adashift adasmooth adatam ademamix adopt aggmo aida alice alig amos ano"
    " apollo apollodqn avagrad came conda dadaptadagrad dadaptadam dadaptadan dadaptlion dadaptsgd diffgrad exadam"
    " fadam fira focus fromage ftrl galore grams gravity grokfastadamw kate kron lamb laprop lars lion madgrad mars"
    " msvag nero novograd padam pid pnm prodigy qhadam qhm racs ranger scalableshampoo"
    " schedulefreeadamw schedulefreeradam scion sgdp sgdsai sgdw shampoo signsgd sm3 soap spam splus"
    " srmm stableadamw stablespam swats tam tiger vsgd yogi"
).split():
    row(
        "pytorch_optimizer",
        _name,
        Network,
        images(4, 1),
        lambda model, n=_name: _training(_get("pytorch_optimizer:load_optimizer")(n)(model.parameters())),
        mean_loss=_name == "alig",
        reason=BY_LOSS if _name == "alig" else "",
    )
for _name in "adago adamuon adammini muon normuon".split():
    row(
        "pytorch_optimizer",
        _name,
        Network,
        images(4, 1),
        lambda model, n=_name: _get("pytorch_optimizer:create_optimizer")(model, n, lr=1e-3, use_lookahead=False),
    )
network("pytorch_optimizer", "ranger21", "pytorch_optimizer:Ranger21", num_iterations=6)
for _name in (
    "adabelief adafactor adafactorbv adamp adamuon adan adopt cadamw clion lamb lambc laprop larc lars"
    " lion lookahead_adamw madgrad mars muon nadamw novograd radam rmsproptf sgdp sgdw"
).split():
    row(
        "timm",
        f"create_optimizer_v2 {_name}",
        Network,
        images(4, 1),
        lambda model, n=_name: _get("timm.optim:create_optimizer_v2")(model, opt=n, lr=1e-3, weight_decay=0.05),
    )
around("timm", "Lookahead", "timm.optim:Lookahead", k=2)
around("pytorch_optimizer", "ScheduleFreeWrapper", "pytorch_optimizer:ScheduleFreeWrapper")
for _name in ("SAM", "LookSAM"):
    network("pytorch_optimizer", f"{_name} with a closure", f"pytorch_optimizer:{_name}", base_optimizer=SGD, lr=1e-2)
for _name in "Adam8bit AdamW8bit Lion8bit SGD8bit RMSprop8bit AdEMAMix8bit AdamW Lion LAMB LARS".split():
    _momentum = {"momentum": 0.9} if _name in ("SGD8bit", "LARS") else {}
    network("bitsandbytes", _name, f"bitsandbytes.optim:{_name}", lr=1e-3, **_momentum)
network("bitsandbytes", "AdamW8bit, all tensors", "bitsandbytes.optim:AdamW8bit", lr=1e-3, min_8bit_size=1)
for _name in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"):
    network("schedulefree", _name, f"schedulefree:{_name}", lr=1e-2)
network(
    "galore-torch",
    "GaLoreAdamW",
    "galore_torch:GaLoreAdamW",
    lr=1e-3,
    grouped={"rank": 4, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"},
)
network(
    "apollo-torch",
    "APOLLOAdamW",
    "apollo_torch:APOLLOAdamW",
    lr=1e-3,
    grouped={
        "rank": 4,
        "update_proj_gap": 3,
        "scale": 1,
        "proj": "random",
        "proj_type": "std",
        "scale_type": "channel",
    },
)
network("prodigyopt", "Prodigy", "prodigyopt:Prodigy")
for _name in ("DAdaptAdam", "DAdaptSGD", "DAdaptAdaGrad", "DAdaptLion"):
    network("dadaptation", _name, f"dadaptation:{_name}")
network("lion-pytorch", "Lion", "lion_pytorch:Lion", lr=1e-3)
network("came-pytorch", "CAME", "came_pytorch:CAME", lr=1e-3)
for _name in ("SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad RMSprop Rprop ASGD Adafactor").split():
    network("torch", _name, f"torch.optim:{_name}")
network(
    "torch",
    "LBFGS",
    "torch.optim:LBFGS",
    lr=0.1,
    max_iter=3,
    tolerance=1e-3,
    reason="it divides differences of gradients by each other",
)


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


class Batches(Dataset):
    """What ``draw`` draws from the item's own seed."""

    def __init__(self, draw: Callable[[], Batch], num_items: int) -> None:
        self.draw, self.num_items = draw, num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> Batch:
        with torch.random.fork_rng():
            torch.manual_seed(1000 + index)
            return self.draw()


class Trained(zoo.Zoo):
    """A row's model; its loss is the model's own or the mean square of all that it returns."""

    def __init__(self, row: Row) -> None:
        self.row = row
        super().__init__()
        self.mean_loss = False

    def build(self) -> None:
        self.net = self.row.model()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.mean_loss:
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            loss = loss + (mean / self.trainer.world_size - loss.detach())
        return loss

    def loss(self, batch: Batch) -> Tensor:
        output = self.net(**batch) if isinstance(batch, dict) else self.net(*batch)
        own = output.get("loss") if isinstance(output, dict) else output
        if isinstance(own, Tensor) and own.dim() == 0:
            return own
        tensors = [t for t in pytree.tree_leaves(_plain(output)) if isinstance(t, Tensor) and t.requires_grad]
        return torch.stack([t.float().square().mean() for t in tensors]).sum()

    def configure_optimizers(self) -> Any:
        return self.row.optimizer(self.net)


def _plain(output: Any) -> Any:
    """Outputs of libraries as dicts and tuples that pytree knows."""
    if isinstance(output, dict):
        return {k: _plain(v) for k, v in output.items()}
    if hasattr(output, "sample") and isinstance(getattr(output, "sample", None), Tensor):
        return output.sample
    return output


def train(key: str, strategy: str | dict[str, Any]) -> zoo.Result:
    """Fits one row on this rank."""
    find_packages()
    torch.manual_seed(11)
    torch.set_num_threads(1)
    row = ROWS[key]
    module = Trained(row)
    module.mean_loss = row.mean_loss and isinstance(strategy, str)
    trainer = zoo.make_trainer(strategy, max_epochs=1, limit_val_batches=0)
    # Dropout differs between ranks; what an optimizer draws has to be the same, or ranks part under DDP
    torch.manual_seed(12 + (int(os.environ["RANK"]) if row.model is not Network else 0))
    trainer.fit(module, DataLoader(Batches(row.batch, NUM_STEPS * int(os.environ["WORLD_SIZE"])), batch_size=None))
    weights = {name: value.detach().clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return zoo.Result(module.losses, weights, {}, {})


def compare(key: str, stages: tuple[int, ...] = STAGES) -> list[float]:
    """How far each stage is from ``ddp`` on this rank: the largest relative difference of losses and weights."""
    try:
        reference = train(key, "ddp_find_unused_parameters_true")
    except Exception as error:
        raise RuntimeError(f"{key} under ddp: {error}") from error
    differences = []
    for stage in stages:
        result = train(key, {"stage": stage, **zoo.BLOCKS})
        differences.append(zoo.difference([result], [reference]).largest)
    return differences
