"""Tiny multimodal models of random weights, with all the files that vLLM wants, and prompts for them.

In the interpreter that has vLLM; nothing is downloaded. That environment has no torchvision. Idefics 3 and
Qwen2-Audio do without; Qwen2-VL imports it for videos and for its fast image processor, of which these
tests use neither, so an empty module stands in for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.connectors.vllm.configs import LLAMA

ATTENTION = 3.0
SIDE = 168  # of an image, in pixels
SIZE = 56  # of what an encoder takes at once
RATE = 16000  # samples a second
MELS = 128  # as the published model has: half a minute is over 1 MiB, which a thread hashes
VIDEO_PROCESSOR = "transformers.models.qwen2_vl.video_processing_qwen2_vl"

TEXT = {**LLAMA, "vocab_size": 280}
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
# The special tokens of each model from 259 on.
TOKENS = {
    "idefics3": ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *TILES],
    "qwen2_audio": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
    "qwen2_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
}


def request(prompt: Any) -> dict[str, Any]:
    """What vLLM takes. prompt: token ids; or a model, token ids with one placeholder for each item, a number
    for each item, from which its content follows, and perhaps a UUID for each, or that they are given as
    embeddings, or by their sizes alone."""
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    modality = "audio" if prompt["model"] == "qwen2_audio" else "image"
    make = _sound if modality == "audio" else _image
    seeds = prompt["items"]
    data: Any = [make(seed) for seed in seeds]
    if prompt.get("embeddings") or prompt.get("sizes"):
        data = _embeddings(seeds)
    if prompt.get("sizes"):
        del data["image_embeds"]
    given: dict[str, Any] = {"prompt_token_ids": prompt["ids"], "multi_modal_data": {modality: data}}
    if prompt.get("uuids"):
        given["multi_modal_uuids"] = {modality: prompt["uuids"]}
    return given


def _image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), np.uint8))


def _embeddings(seeds: list[int]) -> dict[str, torch.Tensor]:
    """What the encoder of Qwen2-VL might have made of images."""
    side = SIDE // 14
    tokens = (side // 2) ** 2
    sources = [torch.Generator().manual_seed(seed) for seed in seeds]
    made = [torch.randn(tokens, TEXT["hidden_size"], generator=source) for source in sources]
    return {"image_embeds": torch.cat(made), "image_grid_thw": torch.tensor([[1, side, side]] * len(seeds))}


def _sound(seed: int) -> tuple[Any, int]:
    """Two seconds."""
    return np.random.default_rng(seed).standard_normal(2 * RATE).astype(np.float32), RATE


def make(path: str, kind: str, seed: int = 0) -> None:
    """A model in the folder ``path``, unless there is one."""
    folder = Path(path)
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer(folder, TOKENS[kind])
    torch.manual_seed(seed)
    model = {"idefics3": _idefics3, "qwen2_audio": _qwen2_audio, "qwen2_vl": _qwen2_vl}[kind](folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ("self_attn" in name or "attn.qkv" in name) and weight.dim() == 2:
                weight *= ATTENTION
    model.float().save_pretrained(path)
    if kind == "qwen2_audio":
        _rename(folder / "model.safetensors", "language_model.model.model", "language_model.model")


def _rename(file: Path, name: str, to: str) -> None:
    """Weights as the published models have them, which transformers writes otherwise."""
    weights = {each.replace(name, to): weight for each, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def _idefics3(folder: Path) -> Any:
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": SIZE, "patch_size": 14, "initializer_range": 0.2}
    _write(
        folder,
        "preprocessor_config",
        image_processor_type="Idefics3ImageProcessor",
        size={"longest_edge": 2 * SIZE},
        max_image_size={"longest_edge": SIZE},
        do_image_splitting=True,
    )
    _write(folder, "processor_config", processor_class="Idefics3Processor", image_seq_len=4)
    config = transformers.Idefics3Config(
        text_config={**TEXT, "model_type": "llama"}, vision_config=vision, image_token_id=260, scale_factor=2
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def _qwen2_audio(folder: Path) -> Any:
    encoder = {"model_type": "qwen2_audio_encoder", "num_mel_bins": MELS, "encoder_layers": 2, "d_model": 64}
    encoder |= {"encoder_attention_heads": 4, "encoder_ffn_dim": 128, "init_std": 0.1}
    _write(
        folder,
        "preprocessor_config",
        feature_extractor_type="WhisperFeatureExtractor",
        feature_size=MELS,
        chunk_length=30,
        n_fft=400,
        hop_length=160,
        sampling_rate=RATE,
        return_attention_mask=True,
    )
    _write(folder, "processor_config", processor_class="Qwen2AudioProcessor")
    config = transformers.Qwen2AudioConfig(
        text_config={**TEXT, "model_type": "qwen2"}, audio_config=encoder, audio_token_index=259
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def _qwen2_vl(folder: Path) -> Any:
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "patch_size": 14}
    _write(
        folder,
        "preprocessor_config",
        image_processor_type="Qwen2VLImageProcessor",
        min_pixels=784,
        max_pixels=64 * 784,
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
    )
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "model_type": "qwen2_vl_text", "rope_scaling": rope},
        vision_config=vision,
        vision_start_token_id=259,
        vision_end_token_id=260,
        image_token_id=261,
        video_token_id=262,
        tie_word_embeddings=False,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def _tokenizer(folder: Path, tokens: list[str]) -> None:
    """Of bytes, as the demo's, with more special tokens."""
    made = Path(__file__).parents[3] / "examples" / "demo" / "tiny_model.py"
    spec = importlib.util.spec_from_file_location("tiny_model", made)
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    content = tiny.tokenizer()
    added = content["added_tokens"]
    added += [{**added[-1], "id": 259 + number, "content": token} for number, token in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny.tokenizer_config()))


def _write(folder: Path, name: str, **content: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


class _Nothing:
    """Whatever is asked of a module that is not there."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __call__(self, *args: object, **kwargs: object) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _NoTorchvision(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        class Module(ModuleType):
            __getattr__ = _Nothing.__getattr__

        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def prepare(model: str) -> None:
    """Before an engine of the model in this folder starts. Stands in for torchvision where it has to;
    transformers has looked for the real one by then, and takes its processors for PIL."""
    config = Path(model, "config.json")
    if not config.exists() or json.loads(config.read_text())["model_type"] != "qwen2_vl":
        return
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.models.auto import video_processing_auto
    from transformers.processing_utils import ProcessorMixin
    from transformers.utils.import_utils import is_torchvision_available

    assert not is_torchvision_available()
    sys.meta_path.append(_NoTorchvision())

    def video_processor(*args: object, **kwargs: object) -> Any:
        return importlib.import_module(VIDEO_PROCESSOR).Qwen2VLVideoProcessor()

    video_processing_auto.AutoVideoProcessor.from_pretrained = video_processor
    ProcessorMixin.check_argument_for_proper_class = lambda processor, name, argument: type(argument)
