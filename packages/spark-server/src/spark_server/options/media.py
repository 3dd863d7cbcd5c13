"""Images and video, adapters, experts, translation."""

# ruff: noqa: RUF009 - option(), switch() and tristate() are dataclasses.field with metadata

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from spark_server.options.spec import Unset, option, switch


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOptions:
    title: ClassVar[str] = "Images and video"

    vision_max_pixels: int | Unset = option(
        "Most pixels of an image; 0 is the checkpoint's bound.",
        unit="pixels",
        default=0,
        minimum=0,
        available=False,
        accepts=(0,),
    )
    vision_allow_remote_images: bool | Unset = switch(
        "Fetch images that a request names by URL.", available=False, in_recipes=False
    )
    vision_remote_image_max_mb: int | Unset = option(
        "Largest image to fetch.", unit="MB", default=20, minimum=1, available=False, in_recipes=False
    )
    vision_remote_image_timeout_s: int | Unset = option(
        "Longest time to fetch an image.", unit="s", default=10, minimum=1, available=False, in_recipes=False
    )
    vision_remote_image_allow_private: bool | Unset = switch(
        "Fetch from private addresses too.", available=False, in_recipes=False
    )
    video_allow_ffmpeg: bool | Unset = switch("Decode video with ffmpeg.", available=False, recipe_rank=57)
    video_ffmpeg_path: Path | Unset = option(
        "The ffmpeg program.", default=Path("ffmpeg"), available=False, in_recipes=False
    )
    video_fps: float | Unset = option("Frames taken from a second.", default=2.0, above=0.0, available=False)
    video_max_frames: int | Unset = option("Most frames of a video.", default=768, minimum=1, available=False)
    video_decode_timeout_s: int | Unset = option(
        "Longest time to decode a video.", unit="s", default=120, minimum=1, available=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    title: ClassVar[str] = "Adapters, experts, translation"

    lora_adapter: tuple[str, ...] | Unset = option(
        "A LoRA adapter; may be given more than once.", available=False, in_recipes=False, metavar="NAME=PATH"
    )
    max_lora_rank: int | Unset = option(
        "Largest rank of an adapter.", default_note="the adapters'", minimum=1, available=False, in_recipes=False
    )
    max_loras: int | Unset = option(
        "Adapters in memory at a time.", default=8, minimum=1, available=False, in_recipes=False
    )
    lora_stageable: tuple[str, ...] | Unset = option(
        "An adapter that a peer can send; may be given more than once.",
        available=False,
        in_recipes=False,
        metavar="NAME=PEER=DIR",
    )
    lora_stageable_disk: tuple[str, ...] | Unset = option(
        "An adapter that can be loaded later; may be given more than once.",
        available=False,
        in_recipes=False,
        metavar="NAME=PATH",
    )
    expert_telemetry: bool | Unset = switch("Report which experts a request used.", available=False)
    expert_category: str | Unset = option("Load only the experts of a category.", available=False, metavar="NAME")
    src_lang: str | Unset = option("Source language of a translation model.", available=False, metavar="CODE")
    tgt_lang: str | Unset = option("Target language of a translation model.", available=False, metavar="CODE")
