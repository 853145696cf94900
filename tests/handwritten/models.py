"""All hand-written models. No rule of the comparison is tuned on those that are held out."""

from __future__ import annotations

from . import images, others, scans, sequences, texts
from .kinds import Handwritten, Planted, planted

MODELS: dict[str, Handwritten] = {
    "gpt": texts.GPT,
    "rotary": texts.ROTARY,
    "moe": texts.MOE,
    "vit": images.VIT,
    "unet": images.UNET,
    "resnet": images.RESNET,
    "mobilenet": images.MOBILENET,
    "seq2seq": sequences.SEQ2SEQ,
    "mamba": sequences.MAMBA,
    "ctc": sequences.CTC,
    "gnn": others.GNN,
    "clip": others.CLIP,
    "gan": others.GAN,
    "flow": others.FLOW,
    "nerf": others.NERF,
    "actor": others.ACTOR,
    "mixer": others.MIXER,
    "alibi": texts.ALIBI,
    "transformer": texts.TRANSFORMER,
    "perceiver": texts.PERCEIVER,
    "diffusion": images.DIFFUSION,
    "convnext": images.CONVNEXT,
    "gru": sequences.GRU,
    "wavenet": sequences.WAVENET,
    "crf": sequences.CRF,
    "pointnet": others.POINTNET,
    "dlrm": others.DLRM,
    "siamese": others.SIAMESE,
    "vae": others.VAE,
    "tied": others.TIED,
    "codes": scans.CODES,
    "forces": scans.FORCES,
    "views": scans.VIEWS,
    "retention": scans.RETENTION,
    "hyena": scans.HYENA,
}

MISTAKES: list[Planted] = [mistake for name, model in MODELS.items() for mistake in planted(name, model)]
