"""Remakes the files of this folder: real gradients of a small transformer that learns to read handwritten digits.

Needs torch and scikit-learn, which gradtool itself does not:

    python sample_data/make.py
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from safetensors.torch import load_file, save
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
SEED = 20
STEPS = 100
DIM = 40
LOSS_SCALE = 1024
EPS = 1e-6
LAYERNORM_EPS = 1e-5
LAYERNORM = "blocks.0.norm"
# Enough of nan.safetensors to show tensors that are wholly, partly and not at all NaN.
NAN_TENSORS = ("blocks.0.fc1.bias", "blocks.0.fc1.weight", "head.bias", "head.weight", "logit_scale", "norm.weight")

Tensors = dict[str, Tensor]
Json = dict[str, Any]
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention and a ReLU network side by side, behind one layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM, eps=LAYERNORM_EPS)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.fc1 = nn.Linear(DIM, 2 * DIM)
        self.fc2 = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, patches, DIM) to the same shape."""
        y = self.norm(x)
        heads = self.qkv(y).unflatten(-1, (3, 4, DIM // 4)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)
        return x + self.proj(attended) + self.fc2(functional.relu(self.fc1(y)))


class DigitReader(nn.Module):
    """A transformer over the sixteen 2x2 patches of an 8x8 image, with a cosine classifier on top."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(4, DIM)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(16, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM, eps=LAYERNORM_EPS)
        self.head = nn.Linear(DIM, 10)
        self.logit_scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (batch, 8, 8) to logits (batch, 10)."""
        patches = functional.unfold(images[:, None], kernel_size=2, stride=2).mT
        x = self.patch_embed(patches) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        inked = (patches.amax(-1, keepdim=True) > 0).to(x.dtype)
        pooled = (self.norm(x) * inked).sum(1) / inked.sum(1).clamp(min=1)
        # The slope of sqrt is infinite at 0: a blank image has finite logits and, going backward, 0 * inf = NaN. A
        # well-known trap, left open on purpose: it makes nan.safetensors.
        length = pooled.square().sum(-1, keepdim=True).sqrt()
        return self.logit_scale * self.head(pooled / (length + EPS))


def load_images() -> Batch:
    """Scikit-learn's digits in a fixed random order: images (1797, 8, 8) in [0, 1], labels (1797,)."""
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    return torch.tensor(digits.images / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order]


def sample(data: Batch, size: int) -> Batch:
    """A random batch."""
    chosen = torch.randint(len(data[1]), (size,))
    return data[0][chosen], data[1][chosen]


def train(data: Batch) -> DigitReader:
    """A model in mid-training: it reads most digits, and its gradients are still of a size worth clipping."""
    model = DigitReader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        images, labels = sample(data, 128)
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    accuracy = (model(data[0]).argmax(-1) == data[1]).double().mean().item()
    print(f"accuracy after {STEPS} steps: {accuracy:.3f}")
    return model


def gradients(model: DigitReader, batch: Batch, loss_scale: float = 1.0) -> Tensors:
    """The gradient of loss_scale times the batch's mean loss, by parameter name."""
    model.zero_grad()
    (functional.cross_entropy(model(batch[0]), batch[1]) * loss_scale).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def write(path: Path, tensors: Tensors, **metadata: object) -> None:
    """Writes one safetensors file, the same bytes each time."""
    text = {"format": "pt", "step": str(STEPS)} | {key: str(value) for key, value in metadata.items()}
    raw = save({name: tensor.contiguous() for name, tensor in tensors.items()}, text)
    # The library writes the metadata in the order of a randomly seeded hash table. Sorting moves keys only, so the
    # header keeps its length and the data its alignment.
    size = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:size])
    header = {"__metadata__": dict(sorted(header.pop("__metadata__").items()))} | header
    packed = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size - 8)
    path.write_bytes(raw[:8] + packed + raw[size:])


def write_sharded(folder: Path, tensors: Tensors, num_tokens: int) -> None:
    """Writes two shards, a block of the model in each, and their index."""
    folder.mkdir(exist_ok=True)
    names, half = list(tensors), len(tensors) // 2
    weight_map = {}
    for number, shard in enumerate((names[:half], names[half:]), 1):
        filename = f"model-{number:05}-of-00002.safetensors"
        write(folder / filename, {name: tensors[name] for name in shard}, num_tokens=num_tokens)
        weight_map |= dict.fromkeys(shard, filename)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: Json) -> None:
    """Writes JSON whose floats read back to the same bits."""
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_layernorm(model: DigitReader, batch: Batch) -> None:
    """Writes what one layer norm of the model saw in a backward pass, and torch's own answers to it."""
    seen: list[Tensor] = []
    norm = model.blocks[0].norm

    def keep(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        output.retain_grad()
        seen.extend((inputs[0], output))

    hook = norm.register_forward_hook(keep)
    gradients(model, batch)
    hook.remove()
    x, y = seen
    _, mean, inv_std_dev = torch.native_layer_norm(x, [DIM], norm.weight, norm.bias, LAYERNORM_EPS)
    inputs = {"Y_grad": y.grad, "X": x, "Y": y, "scale": norm.weight, "bias": norm.bias}
    inputs = {name: tensor.detach() for name, tensor in (inputs | {"mean": mean, "inv_std_dev": inv_std_dev}).items()}
    # In float64 the statistics are the stored ones, made wider: the exact answer to the file as it stands.
    answers = layernorm_backward(inputs)
    wide = layernorm_backward({name: tensor.double() for name, tensor in inputs.items()})
    answers |= {f"{name}_f64": tensor for name, tensor in wide.items()}
    for filename, tensors in (("layernorm", inputs), ("layernorm_expected", answers)):
        named = {f"{LAYERNORM}.{name}": tensor for name, tensor in tensors.items()}
        write(HERE / f"{filename}.safetensors", named, num_tokens=len(x), eps=LAYERNORM_EPS)


def layernorm_backward(inputs: Tensors) -> Tensors:
    """Torch's layer-norm backward pass, in the type of the inputs."""
    y_grad, x, mean, inv_std_dev = (inputs[name] for name in ("Y_grad", "X", "mean", "inv_std_dev"))
    affine = inputs["scale"], inputs["bias"]
    answers = torch.ops.aten.native_layer_norm_backward(y_grad, x, [DIM], mean, inv_std_dev, *affine, [True] * 3)
    return dict(zip(("X_grad", "scale_grad", "bias_grad"), answers, strict=True))


def write_gradients(model: DigitReader, data: Batch) -> None:
    """Writes the gradient sets: one micro-batch each, all at the same weights."""
    micro = {"buffer": (64, torch.float32), "micro_0": (128, torch.bfloat16), "micro_1": (96, torch.bfloat16)}
    for stem, (size, dtype) in micro.items():
        grads = {name: grad.to(dtype) for name, grad in gradients(model, sample(data, size)).items()}
        write(HERE / f"{stem}.safetensors", grads, num_tokens=size)
    write_sharded(HERE / "sharded", gradients(model, sample(data, 160)), num_tokens=160)
    scaled = {name: grad.half() for name, grad in gradients(model, sample(data, 64), LOSS_SCALE).items()}
    write(HERE / "loss_scaled_f16.safetensors", scaled, num_tokens=64, loss_scale=LOSS_SCALE)
    images, labels = sample(data, 32)
    images[-1] = 0
    grads = gradients(model, (images, labels))
    write(HERE / "nan.safetensors", {name: grads[name] for name in NAN_TENSORS}, num_tokens=32)


def load(*paths: Path) -> list[tuple[str, Tensor]]:
    """The tensors of some files, flat and in float64, which holds every stored value exactly."""
    return [(name, tensor.double().flatten()) for path in paths for name, tensor in load_file(path).items()]


def norm_of(vector: Tensor, p: float = 2) -> float | None:
    """The p-norm of a float64 vector; None where a NaN or Inf leaves it without one."""
    norm = torch.linalg.vector_norm(vector, p).item()
    return norm if math.isfinite(norm) else None


def facts(tensors: list[tuple[str, Tensor]]) -> Json:
    """What must be found in these tensors as one gradient vector."""
    vector = torch.cat([tensor for _, tensor in tensors])
    norm = norm_of(vector)
    return {
        "tensors": len(tensors),
        "elements": vector.numel(),
        "zeros": int((vector == 0).sum()),
        "nan": int(vector.isnan().sum()),
        "inf": int(vector.isinf().sum()),
        **{f"norm_{p}": norm_of(vector, float(p)) for p in (1, 2, 3, "inf")},
        "coef": None if norm is None else 1.0 / (norm + EPS),  # for max_norm = 1
    }


def nonfinite(tensor: Tensor) -> Json:
    """How many NaN and Inf a flat tensor holds, and the index of the first."""
    first = tensor.isfinite().logical_not().nonzero()[0]
    return {"nan": int(tensor.isnan().sum()), "inf": int(tensor.isinf().sum()), "first_index": int(first)}


def expected() -> Json:
    """What must be found in the files, computed by torch in float64 from the values stored there."""
    stems = ("micro_0", "micro_1", "buffer", "loss_scaled_f16", "nan")
    sets = {f"{stem}.safetensors": load(HERE / f"{stem}.safetensors") for stem in stems}
    sets["sharded"] = load(*sorted((HERE / "sharded").glob("*.safetensors")))
    result = {
        key: facts(tensors) | {"per_tensor": {n: norm_of(t) for n, t in tensors}} for key, tensors in sets.items()
    }
    scaled = result["loss_scaled_f16.safetensors"]
    scaled["unscaled_norm_2"] = scaled["norm_2"] / LOSS_SCALE
    scaled["unscaled_coef"] = 1.0 / (scaled["unscaled_norm_2"] + EPS)
    poisoned = {n: nonfinite(t) for n, t in sets["nan.safetensors"] if not t.isfinite().all()}
    result["nan.safetensors"]["nonfinite"] = poisoned
    result["micro_0+micro_1"] = facts(sets["micro_0.safetensors"] + sets["micro_1.safetensors"])
    return result | {"versions": {module.__name__: module.__version__ for module in (torch, sklearn, np)}}


def main() -> None:
    """Trains the model and writes every file of this folder but the README."""
    # Sums split over threads would differ between machines, and so would the bytes.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    data = load_images()
    model = train(data)
    write_gradients(model, data)
    write_layernorm(model, sample(data, 4))
    write_json(HERE / "expected.json", expected())


if __name__ == "__main__":
    main()
