"""What models are fed: tokens, images and sound, with labels. Always the same for a generator's seed."""

from __future__ import annotations

import torch
from torch import Tensor

WORDS, LENGTH, ROWS, CLASSES = 96, 12, 4, 5

Batch = dict[str, Tensor]


def language(random: torch.Generator, *, pad: int = 0, length: int = LENGTH) -> Batch:
    """Tokens, their mask, and labels that leave the padding out."""
    tokens = torch.randint(3, WORDS, (ROWS, length), generator=random)
    mask = (torch.arange(length) < torch.tensor([length, length * 3 // 4, length, length // 2])[:, None]).long()
    return {
        "input_ids": tokens.masked_fill(mask == 0, pad),
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def unpadded(random: torch.Generator) -> Batch:
    """Tokens without a mask."""
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH), generator=random)
    return {"input_ids": tokens, "labels": tokens}


def classified(random: torch.Generator, *, pad: int = 0, length: int = LENGTH) -> Batch:
    """Tokens, their mask, and a class for each row."""
    batch = language(random, pad=pad, length=length)
    return batch | {"labels": torch.randint(CLASSES, (ROWS,), generator=random)}


def unmasked(random: torch.Generator) -> Batch:
    """The same for a model that knows no mask."""
    batch = classified(random)
    del batch["attention_mask"]
    return batch


def pictures(random: torch.Generator, *, rows: int = ROWS, size: int = 32) -> Batch:
    """Images and their classes."""
    return {
        "pixel_values": torch.randn(rows, 3, size, size, generator=random),
        "labels": torch.randint(CLASSES, (rows,), generator=random),
    }


def speech(random: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(ROWS, 8, 24, generator=random),
        "labels": torch.randint(3, WORDS, (ROWS, LENGTH), generator=random),
    }


def captioned(random: torch.Generator) -> Batch:
    batch = language(random)
    del batch["labels"]
    batch["input_ids"][:, 5] = WORDS - 1  # the token whose state stands for the sentence
    return batch | {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random)}


def recordings(random: torch.Generator) -> Batch:
    """Sound, and its class."""
    return {
        "input_values": torch.randn(ROWS, 200, generator=random),
        "labels": torch.randint(CLASSES, (ROWS,), generator=random),
    }


def padded_left(random: torch.Generator, *, length: int = LENGTH) -> Batch:
    """Tokens with padding before them, as for generation. No loss reads what attention makes of the padding."""
    batch = {name: value.flip(1) for name, value in language(random, length=length).items()}
    first = batch["attention_mask"].argmax(1, keepdim=True)
    return batch | {"labels": batch["labels"].scatter(1, first, -100)}


def waves(random: torch.Generator) -> Batch:
    """Sound, of which a part is padding, and a class for each row."""
    mask = (torch.arange(400) < torch.tensor([400, 320, 400, 360])[:, None]).long()
    return {
        "input_values": torch.randn(ROWS, 400, generator=random) * mask,
        "attention_mask": mask,
        "labels": torch.randint(CLASSES, (ROWS,), generator=random),
    }


def scenes(random: torch.Generator) -> Batch:
    """Images with a class for each pixel."""
    return pictures(random) | {"labels": torch.randint(CLASSES, (ROWS, 32, 32), generator=random)}


def dialogues(random: torch.Generator) -> Batch:
    """Tokens, of which four stand for an image."""
    batch = language(random)
    batch["input_ids"][:, 1:5] = WORDS - 1
    batch["labels"][:, 1:5] = -100
    return batch | {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random)}


def clips(random: torch.Generator) -> Batch:
    """Videos of four frames, and their classes."""
    return {
        "pixel_values": torch.randn(ROWS, 4, 3, 16, 16, generator=random),
        "labels": torch.randint(CLASSES, (ROWS,), generator=random),
    }


def spectra(random: torch.Generator) -> Batch:
    """Spectrograms, and their classes."""
    return {
        "input_values": torch.randn(ROWS, 32, 16, generator=random),
        "labels": torch.randint(CLASSES, (ROWS,), generator=random),
    }


def histories(random: torch.Generator) -> Batch:
    """Two series of numbers, some of which were not observed, and how they go on."""
    past = torch.randn(ROWS, 32, 2, generator=random).cumsum(1)
    return {
        "past_values": past,
        "past_observed_mask": torch.rand(ROWS, 32, 2, generator=random) > 0.1,
        "future_values": past[:, -1:] + torch.randn(ROWS, 4, 2, generator=random),
    }


def spoken(random: torch.Generator) -> Batch:
    """Frames of sound, of which a part is padding, and what was said."""
    mask = (torch.arange(24) < torch.tensor([24, 18, 24, 20])[:, None]).long()
    return {
        "input_features": torch.randn(ROWS, 24, 8, generator=random) * mask[..., None],
        "attention_mask": mask,
        "labels": torch.randint(3, WORDS, (ROWS, LENGTH), generator=random),
    }


def forms(random: torch.Generator) -> Batch:
    """Tokens with their boxes on a page, and a class for each of them."""
    batch = language(random)
    corner = torch.randint(0, 16, (ROWS, LENGTH, 2), generator=random)
    size = torch.randint(1, 16, (ROWS, LENGTH, 2), generator=random)
    labels = torch.randint(CLASSES, (ROWS, LENGTH), generator=random)
    labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
    return batch | {"bbox": torch.cat((corner, corner + size), -1), "labels": labels}


def framed(random: torch.Generator) -> Batch:
    """Images, of which a part may be margin, with a class and a box for each of six objects."""
    mask = torch.ones(ROWS, 64, 64, dtype=torch.long)
    mask[1, :, 48:], mask[3, 32:] = 0, 0
    return {
        "pixel_values": torch.randn(ROWS, 3, 64, 64, generator=random) * mask[:, None],
        "pixel_mask": mask,
        "classes": torch.randint(CLASSES, (ROWS, 6), generator=random),
        "boxes": torch.rand(ROWS, 6, 4, generator=random),
    }


def read_padding(random: torch.Generator) -> Batch:
    """Tokens with padding before them. The first token of a text has a label, so the loss reads a padded position."""
    return {name: value.flip(1) for name, value in language(random).items()}


def padding_labelled(random: torch.Generator) -> Batch:
    """Tokens with padding after them, which nobody took out of the labels."""
    batch = language(random)
    return batch | {"labels": batch["input_ids"]}


def with_empty_row(random: torch.Generator) -> Batch:
    """Tokens with padding before them, and a row of padding alone, as the last batch of a data set may have it."""
    batch = padded_left(random)
    for name, value in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        batch[name][2] = value
    return batch


def alone(random: torch.Generator, *, length: int = 80) -> Batch:
    """One row with padding before it."""
    return {name: value[1:2] for name, value in padded_left(random, length=length).items()}


def packed(random: torch.Generator) -> Batch:
    """Texts one after the other in each row, told apart by their positions alone. The first token of a text is not
    predicted from the text before."""
    starts = torch.tensor([[5, 15], [8, 11], [3, 17], [10, 16]])
    places = torch.arange(20).expand(ROWS, -1)
    first = torch.where(places >= starts[:, 1:], starts[:, 1:], torch.where(places >= starts[:, :1], starts[:, :1], 0))
    tokens = torch.randint(3, WORDS, (ROWS, 20), generator=random)
    return {
        "input_ids": tokens,
        "position_ids": places - first,
        "labels": tokens.masked_fill(places == first, -100),
    }


def translated(random: torch.Generator) -> Batch:
    """Sources with padding before them, and shorter targets with padding after them."""
    source = {name: value.flip(1) for name, value in language(random, length=20).items() if name != "labels"}
    return source | {"labels": language(random, length=8)["labels"]}


def listened(random: torch.Generator) -> Batch:
    """Sound, of which a part is padding, and what was said."""
    mask = (torch.arange(6144) < torch.tensor([6144, 4000, 6144, 2600])[:, None]).long()
    return {
        "input_values": torch.randn(ROWS, 6144, generator=random) * mask,
        "attention_mask": mask,
        "labels": language(random, length=8)["labels"],
    }


def asked(
    random: torch.Generator, *, pad: int = 0, length: int = LENGTH, empty: bool = True, languages: int = 0
) -> Batch:
    """Tokens, their mask, and a class for each row; a row of padding alone, without a class, or a language for each."""
    batch = classified(random, pad=pad, length=length)
    if empty:
        batch["input_ids"][2], batch["attention_mask"][2], batch["labels"][2] = pad, 0, -100
    if languages:
        batch["lang_ids"] = torch.arange(ROWS) % languages
    return batch


def tagged(random: torch.Generator) -> Batch:
    """Tokens, their mask, a kind of task, and a class for each token that is not padding."""
    batch = language(random, length=18)
    labels = torch.randint(CLASSES, (ROWS, 18), generator=random).masked_fill(batch["attention_mask"] == 0, -100)
    kinds = (torch.arange(18) >= 9).long().expand(ROWS, -1).contiguous()
    return batch | {"labels": labels, "token_type_ids": kinds, "task_type_ids": kinds.flip(1)}


def chained(random: torch.Generator) -> Batch:
    """Two or three chains in each row, told apart by their numbers; some tokens are masked, and have labels alone."""
    tokens = torch.randint(3, WORDS - 1, (ROWS, 16), generator=random)
    hidden = (torch.arange(16) % 5 == torch.arange(ROWS)[:, None]) & (torch.arange(16) > 0)
    starts = torch.tensor([[6, 16], [4, 11], [9, 16], [5, 13]])
    return {
        "input_ids": tokens.masked_fill(hidden, WORDS - 1),
        "sequence_id": (torch.arange(16)[None, :, None] >= starts[:, None]).sum(-1),
        "labels": tokens.masked_fill(~hidden, -100),
    }


def _frames(random: torch.Generator, length: int, width: int) -> Batch:
    """Frames of sound, of which a part is padding."""
    mask = (torch.arange(length) < torch.tensor([length, length * 3 // 4, length, length * 5 // 8])[:, None]).long()
    return {
        "input_features": torch.randn(ROWS, length, width, generator=random) * mask[..., None],
        "attention_mask": mask,
    }


def sounds(random: torch.Generator) -> Batch:
    """Frames of sound, and a class for each row."""
    return _frames(random, 24, 8) | {"labels": torch.randint(CLASSES, (ROWS,), generator=random)}


def transcribed(random: torch.Generator) -> Batch:
    """Frames of sound, and what was said, with padding after it."""
    return _frames(random, 64, 16) | {"labels": language(random, length=8)["labels"]}


def dictated(random: torch.Generator) -> Batch:
    """Frames of sound, and what was said, which a loss aligns with them; padding is the token 0."""
    return _frames(random, 64, 16) | {"labels": language(random, length=6)["labels"].clamp(min=0)}


def questions(random: torch.Generator) -> Batch:
    """Questions, in which every token sees all others, and answers, which alone have labels; padding before both."""
    batch = padded_left(random, length=16)
    places = batch["attention_mask"].cumsum(1) - 1
    asks = (places < torch.tensor([7, 4, 5, 3])[:, None]) & (batch["attention_mask"] == 1)
    return batch | {"token_type_ids": asks.long(), "labels": batch["labels"].masked_fill(asks, -100)}


def masked_words(random: torch.Generator) -> Batch:
    """Texts with padding after them. Some tokens are masked, and have labels alone."""
    batch = language(random, pad=0, length=18)
    chosen = (torch.arange(18) % 4 == torch.arange(ROWS)[:, None]) & (batch["attention_mask"] == 1)
    tokens = batch["input_ids"].masked_fill(chosen, WORDS - 1)
    return batch | {"input_ids": tokens, "labels": batch["labels"].masked_fill(~chosen, -100)}


def recorded(random: torch.Generator) -> Batch:
    """Frames of eight samples each, of which a part is padding, and what was said, with padding after it."""
    mask = (torch.arange(256) < torch.tensor([256, 120, 256, 64])[:, None]).long()
    return {
        "input_values": torch.randn(ROWS, 256, generator=random) * mask,
        "attention_mask": mask,
        "labels": language(random, length=8)["labels"],
    }


def sized_images(random: torch.Generator) -> Batch:
    """Images of several sizes, as lists of patches with padding after them, and their classes."""
    shapes = torch.tensor([[4, 4], [3, 5], [2, 6], [5, 2]])
    mask = (torch.arange(16) < shapes.prod(1)[:, None]).long()
    return {
        "pixel_values": torch.randn(ROWS, 16, 48, generator=random) * mask[..., None],
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
        "labels": torch.randint(CLASSES, (ROWS,), generator=random),
    }


def hidden_patches(random: torch.Generator) -> Batch:
    """Images, and numbers that decide which of their patches an encoder sees."""
    return {
        "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=random),
        "noise": torch.rand(ROWS, 16, generator=random),
    }


def forecast(random: torch.Generator) -> Batch:
    """Series of several lengths, how often they were observed, and how they go on."""
    past = torch.randn(ROWS, 32, generator=random).cumsum(1)
    return {
        "past_values": past,
        "lengths": torch.tensor([32, 22, 32, 17]),
        "freq": torch.tensor([0, 1, 2, 1]),
        "future_values": past[:, -1:] + torch.randn(ROWS, 8, generator=random),
    }


def prefixed(random: torch.Generator) -> Batch:
    """Four tokens for an image, a question, in which every token sees all others, and an answer, which has labels."""
    batch = language(random, length=14)
    answer = (torch.arange(14) >= torch.tensor([8, 6, 7, 5])[:, None]).long()
    batch["input_ids"].clamp_(max=WORDS - 2)[:, :4] = WORDS - 1
    return batch | {
        "token_type_ids": answer,
        "labels": batch["labels"].masked_fill(answer == 0, -100),
        "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random),
    }


def labelled(random: torch.Generator, *, length: int = 18) -> Batch:
    """Tokens, their mask, and a class for each token that is not padding."""
    batch = language(random, length=length)
    labels = torch.randint(CLASSES, (ROWS, length), generator=random)
    return batch | {"labels": labels.masked_fill(batch["attention_mask"] == 0, -100)}


def pages(random: torch.Generator) -> Batch:
    """Tokens with their boxes on a page, the image of the page, and a class for each token."""
    return forms(random) | {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random)}


def illustrated(random: torch.Generator) -> Batch:
    """A question after two images of other sizes in some rows, as lists of patches; padding before the text."""
    batch = language(random, length=16)
    kinds = torch.zeros(ROWS, 16, dtype=torch.long)
    grids = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 2], [1, 4, 4], [1, 2, 2]])
    for row, start, count in ((0, 1, 4), (1, 2, 2), (2, 1, 2), (2, 6, 4), (3, 1, 1)):
        kinds[row, start : start + count] = 1
    tokens = batch["input_ids"].clamp(max=WORDS - 2).masked_fill(kinds == 1, WORDS - 1)
    text = {
        "input_ids": tokens,
        "attention_mask": batch["attention_mask"],
        "mm_token_type_ids": kinds,
        "labels": batch["labels"].masked_fill(kinds == 1, -100),
    }
    turned = {name: value.flip(1) for name, value in text.items()}
    first = turned["attention_mask"].argmax(1, keepdim=True)
    patches = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4, generator=random)
    return turned | {
        "labels": turned["labels"].scatter(1, first, -100),
        "pixel_values": patches,
        "image_grid_thw": grids[[0, 1, 3, 2, 4]],
    }


def played(random: torch.Generator) -> Batch:
    """What an agent saw and did; earlier steps of some episodes are padding."""
    mask = (torch.arange(8) >= torch.tensor([0, 3, 0, 5])[:, None]).long()
    return {
        "states": torch.randn(ROWS, 8, 6, generator=random),
        "actions": torch.randn(ROWS, 8, 3, generator=random),
        "rewards": torch.randn(ROWS, 8, 1, generator=random),
        "returns_to_go": torch.randn(ROWS, 8, 1, generator=random),
        "timesteps": (torch.arange(8) - (mask == 0).sum(1, keepdim=True)).clamp(min=0) + 2,
        "attention_mask": mask,
        "targets": torch.rand(ROWS, 8, 3, generator=random) * 2 - 1,
    }


def read_aloud(random: torch.Generator) -> Batch:
    """A text, a speaker, and frames of sound, which end at several places."""
    batch = language(random, length=10)
    ended = torch.arange(14) >= torch.tensor([14, 9, 12, 7])[:, None]
    frames = torch.randn(ROWS, 14, 8, generator=random)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "speaker_embeddings": torch.randn(ROWS, 6, generator=random),
        "labels": frames.masked_fill(ended[..., None], -100.0),
    }


def sharpened(random: torch.Generator) -> Batch:
    """Images, and the same in twice the size."""
    return {
        "pixel_values": torch.rand(2, 3, 12, 16, generator=random),
        "targets": torch.rand(2, 3, 24, 32, generator=random),
    }


def sold(random: torch.Generator) -> Batch:
    """Series with features of the time and a kind each, some numbers not observed, and how they go on."""
    past = torch.randn(ROWS, 22, generator=random).cumsum(1)
    return {
        "past_values": past,
        "past_time_features": torch.randn(ROWS, 22, 2, generator=random),
        "past_observed_mask": (torch.rand(ROWS, 22, generator=random) > 0.1).float(),
        "static_categorical_features": torch.arange(ROWS)[:, None] % 3,
        "future_values": past[:, -1:] + torch.randn(ROWS, 6, generator=random),
        "future_time_features": torch.randn(ROWS, 6, 2, generator=random),
    }


def spelled(random: torch.Generator) -> Batch:
    """Texts whose words have two further signs each. Some words are masked, and have labels alone."""
    batch = masked_words(random)
    for name in ("input_shape_ids", "input_pronunciation_ids"):
        batch[name] = torch.randint(3, WORDS, (ROWS, 18), generator=random)
    return batch


def related(random: torch.Generator) -> Batch:
    """Texts with two or three things that they name, at one to three tokens each, and how the first two are related."""
    batch = classified(random, length=14)
    places = torch.tensor([[1, 2, -1], [4, -1, -1], [5, 6, 3]]).repeat(ROWS, 1, 1)
    places[1, 0], places[3, 1] = torch.tensor([3, -1, -1]), torch.tensor([0, 2, 5])
    there = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 0]])
    return batch | {
        "entity_ids": torch.randint(1, 12, (ROWS, 3), generator=random) * there,
        "entity_attention_mask": there,
        "entity_position_ids": places.masked_fill(there[..., None] == 0, -1),
    }


def tiled(random: torch.Generator) -> Batch:
    """Texts, and an image of one or two tiles, which no token before it sees."""
    batch = language(random)
    tiles = torch.tensor([2, 1, 2, 1])
    shown = (torch.arange(2) < tiles[:, None]).long()
    seen = (torch.arange(LENGTH)[None, :, None] >= torch.tensor([1, 0, 4, 2])[:, None, None]) & (shown[:, None] == 1)
    pictures = torch.randn(ROWS, 1, 2, 3, 16, 16, generator=random)
    return batch | {
        "pixel_values": pictures * shown[:, None, :, None, None, None],
        "aspect_ratio_ids": tiles[:, None],
        "aspect_ratio_mask": shown[:, None],
        "cross_attention_mask": seen.long()[:, :, None],
    }


def phonemes(random: torch.Generator) -> Batch:
    """What is said, how long, how high and how loud each part is, by whom, and frames of the sound."""
    batch = language(random, length=8)
    del batch["labels"]
    mask = batch["attention_mask"]
    lengths = torch.randint(1, 4, mask.shape, generator=random) * mask
    frames = torch.randn(ROWS, int(lengths.sum(1).max()), 8, generator=random)
    ended = torch.arange(frames.shape[1]) >= lengths.sum(1, keepdim=True)
    return batch | {
        "spectrogram_labels": frames.masked_fill(ended[..., None], -100.0),
        "duration_labels": lengths,
        "pitch_labels": torch.randn(ROWS, 8, 1, generator=random) * mask[..., None],
        "energy_labels": torch.randn(ROWS, 8, 1, generator=random) * mask[..., None],
        "speaker_ids": torch.tensor([[0], [1], [2], [1]]),
    }


def channels(random: torch.Generator) -> Batch:
    """Three series of numbers, some of which were not observed, and how they go on."""
    past = torch.randn(ROWS, 24, 3, generator=random).cumsum(1)
    return {
        "past_values": past,
        "observed_mask": (torch.rand(ROWS, 24, 3, generator=random) > 0.15).float(),
        "future_values": past[:, -1:] + torch.randn(ROWS, 6, 3, generator=random),
    }


def films(random: torch.Generator) -> Batch:
    """Videos of four frames, and their classes."""
    batch = clips(random)
    return {"pixel_values_videos": batch["pixel_values"], "labels": batch["labels"]}


def tones(random: torch.Generator) -> Batch:
    """Sound in one channel."""
    return {"input_values": torch.randn(ROWS, 1, 96, generator=random)}
