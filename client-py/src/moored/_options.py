"""The options of a call: shown by `help()`, checked by name, and written into messages by field.

The TypedDicts of `_requests` are the one place that names them, each with its words.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ._errors import refused

M = TypeVar("M", bound=Message)
F = TypeVar("F", bound=Callable[..., Any])

# Names in other libraries, and the names here.
ELSEWHERE: Mapping[str, str] = {
    "num_inference_steps": "write steps=...",
    "num_steps": "write steps=...",
    "sampling_steps": "write steps=...",
    "guidance_scale": "write guidance=...",
    "cfg_scale": "write guidance=...",
    "cfg": "write guidance=...",
    "true_cfg_scale": "write true_guidance=..., with negative_prompt=...",
    "num_images_per_prompt": "write count=...",
    "num_videos_per_prompt": "write count=...",
    "num_waveforms_per_prompt": "write count=...",
    "batch_size": "write count=..., or give a list of prompts",
    "n": "write count=...",
    "generator": "write seed=...: the same seed gives the same result",
    "latents": "write init_latent=..., a latent that put_latent() has brought to the service",
    "image": "write init_image=..., or for models that edit references=[...]",
    "reference_image": "write references=[...]",
    "reference_images": "write references=[...]",
    "video": "write init_media=..., a film uploaded by put_media()",
    "init_video": "write init_media=..., a film uploaded by put_media()",
    "init_audio": "write init_media=..., a track uploaded by put_media()",
    "src_audio": "write init_media=..., a track uploaded by put_media()",
    "reference_audio": "write reference=..., a track uploaded by put_media()",
    "task_type": "write task=...",
    "track_name": "write tracks=[...]",
    "repainting_start": "write window=(start, end)",
    "repainting_end": "write window=(start, end)",
    "keyscale": "write key=...",
    "timesignature": "write time_signature=...",
    "vocal_language": "write language=...",
    "initial_audio_waveforms": "write init_media=..., a track uploaded by put_media()",
    "init_img": "write init_image=...",
    "last_image": "write end_image=...",
    "end_frame": "write end_image=...",
    "denoising_strength": "write strength=...",
    "num_frames": "write frames=...",
    "fps": "write frames_per_second=...",
    "frame_rate": "write frames_per_second=...",
    "audio_end_in_s": "write seconds=...",
    "audio_length_in_s": "write seconds=...",
    "audio_duration": "write seconds=...",
    "duration": "write seconds=...",
    "output_type": "write output='png' or output='raw'; a result has .image and .array",
    "return_dict": "leave it out: a result has .image and .array",
    "callback_on_step_end": "the steps are events of stream_image() and its like",
    "callback": "the steps are events of stream_image() and its like",
    "size": "write width=... and height=...",
    "device": "write card=...",
    "negative_prompt_2": "write negative_prompt=..., with true_guidance=...",
    "prompt_2": "moored gives both text encoders the one prompt: leave it out",
    "mask_image": "write mask=...: white changes, black stays",
    "padding_mask_crop": "moored keeps what is not masked as it is: leave it out",
    "ip_adapter_image": "moored has no IP adapters: leave it out",
    "controlnet": "write controls=[Control(id, image)]",
    "control": "write controls=[Control(id, image)]",
    "control_image": "write controls=[Control(id, image)]",
    "controlnet_conditioning_scale": "write controls=[Control(id, image, scale)]",
    "control_guidance_start": "write controls=[Control(id, image, scale, start, end)]",
    "control_guidance_end": "write controls=[Control(id, image, scale, start, end)]",
    "control_mode": "write controls=[Control(id, image, scale, start, end, mode)]",
    "sampler_name": "write sampler=..., of models with several (SDXL); leave it out of others",
    "scheduler": "write sampler=..., of models with several (SDXL); leave it out of others",
    "sigmas": "the schedule belongs to the model: write steps=...",
    "timesteps": "the schedule belongs to the model: write steps=...",
    "lora": "write adapters=[name], or adapters=[(name, strength)]",
    "loras": "write adapters=[name], or adapters=[(name, strength)]",
    "lora_weights": "write adapters=[(name, strength)]",
    "lora_scale": "write adapters=[(name, strength)]",
    "joint_attention_kwargs": "write adapters=[(name, strength)]",
    "cross_attention_kwargs": "write adapters=[(name, strength)]",
}


def words_of(options: type) -> dict[str, str]:
    """What each option of a TypedDict is for; the caller's own first, then those of all."""
    return {name: hint.__metadata__[0] for name, hint in hints_of(options).items()}


@functools.cache
def hints_of(options: type) -> dict[str, Any]:
    """What a TypedDict and its bases say of each option: type, words, a range if there is one."""
    found: dict[str, Any] = {}
    # Bases are not in the MRO of a TypedDict.
    for kind in (options, *_bases(options)):
        names = {"Image": SimpleNamespace(Image=typing.Any), "os": os, "NDArray": list, "Any": Any}
        hints = typing.get_type_hints(kind, localns=names, include_extras=True)
        inherited = {name for base in _bases(kind) for name in base.__annotations__}
        found |= {name: hints[name] for name in kind.__annotations__ if name not in inherited}
    return {name: found[name] for name in sorted(found, key=lambda name: name != "model")}


def _bases(options: type) -> list[type]:
    bases: list[type] = []
    for base in getattr(options, "__orig_bases__", ()):
        if typing.is_typeddict(base):
            bases += [base, *_bases(base)]
    return bases


def spelled(options: type) -> Callable[[F], F]:
    """Shows a method's options one by one in its signature and its help, and refuses others."""

    def spell(method: F) -> F:
        hints, name = hints_of(options), getattr(method, "__name__", "")

        @functools.wraps(method)
        def checked(self: Any, *given: Any, **named: Any) -> Any:
            for option in named:
                if option not in known:
                    raise TypeError(f"{name}() has no option {option!r}: {_remedy(option, known)}")
            return method(self, *given, **named)

        signature = inspect.signature(method)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [
            inspect.Parameter(
                option,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=typing.get_args(hint)[0],
            )
            for option, hint in hints.items()
        ]
        # `timeout`, and other parameters of a method's own, follow the options.
        first = [each for each in own if each.kind is not each.KEYWORD_ONLY]
        last = [each for each in own if each.kind is each.KEYWORD_ONLY]
        known = {each.name for each in (*own, *more)}
        shown = checked
        shown.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*first, *more, *last]
        )
        told = "\n".join(f"    {option}: {words}" for option, words in words_of(options).items())
        shown.__doc__ = (
            f"{inspect.cleandoc(method.__doc__ or '')}\n\n"
            "Options; None is the same as left out: the default.\n\n"
            f"{told}\n"
        )
        return cast("F", shown)

    return spell


def _remedy(option: str, known: set[str]) -> str:
    if option in ELSEWHERE:
        return ELSEWHERE[option]
    near = difflib.get_close_matches(option, known - {"self"}, n=1)
    return f"did you mean {near[0]}?" if near else "help() of it lists them"


def put(message: Message, field: str, value: Any, *, option: str = "") -> None:
    """Writes one field of a message; what it cannot hold is refused by the option's name."""
    with _by_name(message.DESCRIPTOR.fields_by_name[field], option or field, value):
        if isinstance(value, Message):
            getattr(message, field).CopyFrom(value)
        else:
            setattr(message, field, value)


def message_of(kind: type[M], of: str = "", /, **fields: Any) -> M:
    """A message of these fields. What one cannot hold is refused by its name, `of.field`."""
    try:
        return kind(**fields)
    except (TypeError, ValueError):
        for field, value in fields.items():
            name = f"{of}.{field}" if of else field
            with _by_name(kind.DESCRIPTOR.fields_by_name[field], name, value):
                kind(**{field: value})
        raise


@contextmanager
def _by_name(field: Any, option: str, value: Any) -> Iterator[None]:
    """What a field cannot hold is refused by the option's name."""
    try:
        yield
    except ValueError:
        raise refused(option, f"{value!r} is not {_range(field)}") from None
    except TypeError:
        raise TypeError(f"{option}: {_kind(field)} is wanted, not {value!r}") from None


_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def is_left_out_by_0(field: Any) -> bool:
    """Whether a number of 0 is the same in a message as none: then the default would be taken."""
    numbers = (*_WHOLE, FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
    return field is not None and field.cpp_type in numbers and not field.has_presence


def _range(field: Any) -> str:
    if field.cpp_type in _WHOLE:
        lowest, highest = _WHOLE[field.cpp_type]
        return f"a whole number from {lowest} to {highest}"
    if field.cpp_type in (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE):
        return "text that can be sent: it has half of a character"
    return "a value that can be sent"


def _kind(field: Any) -> str:
    if field.cpp_type in _WHOLE:
        return "a whole number"
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return "a number"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return "True or False"
    return "bytes" if field.type == FieldDescriptor.TYPE_BYTES else "a str"
