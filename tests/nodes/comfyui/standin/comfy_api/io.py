"""Stand-in: inputs, outputs, schemas and nodes of ComfyUI's V3 API, and how they look in `/object_info`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

_PLAIN = ("display_name", "tooltip", "lazy", "rawLink", "advanced")
_WIDGET = (*_PLAIN, "default", "socketless", "widgetType", "forceInput")
_SPELT = {"dynamic_prompts": "dynamicPrompts", "raw_link": "rawLink", "force_input": "forceInput"}


class Input:
    """An input: its name, its type, and what it says besides."""

    io_type = ""
    allowed: tuple[str, ...] = _PLAIN
    always: dict[str, Any] = {}

    def __init__(self, id: str, optional: bool = False, **options: Any) -> None:
        self.id = id
        self.optional = optional
        named = {_SPELT.get(name, name): value for name, value in options.items()}
        unknown = set(named) - set(self.allowed)
        if unknown:
            raise TypeError(f"{self.io_type} has no {', '.join(sorted(unknown))}")
        self.options = self.always | {k: v for k, v in named.items() if v is not None}


class Output:
    """An output."""

    io_type = ""

    def __init__(
        self, id: str | None = None, display_name: str | None = None, tooltip: str | None = None
    ) -> None:
        self.id = id
        self.display_name = display_name or id
        self.tooltip = tooltip


class _Type:
    """A type of what goes along a wire."""

    io_type: str
    Input: type[Input]
    Output: type[Output]


def _type(
    io_type: str, allowed: tuple[str, ...] = _PLAIN, always: dict[str, Any] | None = None
) -> type[_Type]:
    facts = {"io_type": io_type}
    taken = type("Input", (Input,), facts | {"allowed": allowed, "always": always or {}})
    given = type("Output", (Output,), facts)
    return type(io_type, (_Type,), facts | {"Input": taken, "Output": given})


def Custom(io_type: str) -> type[_Type]:
    """A type of a pack's own."""
    return _type(io_type)


AnyType = _type("*")
Image = _type("IMAGE")
Mask = _type("MASK")
Audio = _type("AUDIO")
Video = _type("VIDEO")
Latent = _type("LATENT")
Boolean = _type("BOOLEAN", (*_WIDGET, "label_on", "label_off"))
Int = _type("INT", (*_WIDGET, "min", "max", "step", "control_after_generate", "display"))
Float = _type("FLOAT", (*_WIDGET, "min", "max", "step", "round", "display"))
String = _type(
    "STRING", (*_WIDGET, "multiline", "placeholder", "dynamicPrompts"), {"multiline": False}
)
Combo = _type(
    "COMBO", (*_WIDGET, "options", "control_after_generate", "remote"), {"multiselect": False}
)


class MatchType:
    """Any type: an output has that of what is linked to the input of the same template."""

    io_type = "COMFY_MATCHTYPE_V3"

    class Template:
        """What they have in common."""

        def __init__(self, template_id: str) -> None:
            self.template_id = template_id

        def as_dict(self) -> dict[str, str]:
            """As `/object_info` shows it."""
            return {"template_id": self.template_id, "allowed_types": "*"}

    class Input(Input):
        """An input of any type."""

        io_type = "COMFY_MATCHTYPE_V3"

        def __init__(
            self, id: str, template: MatchType.Template, optional: bool = False, **options: Any
        ) -> None:
            super().__init__(id, optional, **options)
            self.options["template"] = template.as_dict()

    class Output(Output):
        """An output of the type of that input."""

        io_type = "COMFY_MATCHTYPE_V3"

        def __init__(
            self,
            template: MatchType.Template,
            id: str | None = None,
            display_name: str | None = None,
            tooltip: str | None = None,
        ) -> None:
            super().__init__(id, display_name, tooltip)
            self.template = template


class Hidden(str, Enum):
    """What a node may ask for besides its inputs."""

    unique_id = "UNIQUE_ID"
    prompt = "PROMPT"
    extra_pnginfo = "EXTRA_PNGINFO"


@dataclass
class Schema:
    """What a node says of itself."""

    node_id: str
    display_name: str | None = None
    category: str = "sd"
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    description: str = ""
    search_aliases: list[str] = field(default_factory=list)
    is_output_node: bool = False

    def __post_init__(self) -> None:
        for kind in (self.inputs, self.outputs):
            names = [one.id for one in kind if one.id]
            if len(names) != len(set(names)):
                raise ValueError(f"{self.node_id} has a name twice: {names}")
        if self.is_output_node:
            self.hidden += [
                one for one in (Hidden.prompt, Hidden.extra_pnginfo) if one not in self.hidden
            ]

    def info(self) -> dict[str, Any]:
        """The node as `/object_info` shows it."""
        groups: dict[str, dict[str, Any]] = {"required": {}}
        for one in self.inputs:
            group = groups.setdefault("optional" if one.optional else "required", {})
            group[one.id] = [one.io_type, one.options]
        if self.hidden:
            groups["hidden"] = {one.name: [one.value] for one in self.hidden}
        matched = [
            one.template.template_id if isinstance(one, MatchType.Output) else None
            for one in self.outputs
        ]
        return {
            "input": groups,
            "input_order": {group: list(names) for group, names in groups.items()},
            "is_input_list": False,
            "output": [one.io_type for one in self.outputs],
            "output_is_list": [False] * len(self.outputs),
            "output_name": [one.display_name or one.io_type for one in self.outputs],
            "output_tooltips": [one.tooltip for one in self.outputs],
            "output_matchtypes": matched if any(matched) else None,
            "name": self.node_id,
            "display_name": self.display_name,
            "description": self.description,
            "category": self.category,
            "output_node": self.is_output_node,
            "has_intermediate_output": False,
            "deprecated": False,
            "experimental": False,
            "dev_only": False,
            "api_node": False,
            "price_badge": None,
            "search_aliases": self.search_aliases or None,
            "essentials_category": None,
        }


@dataclass
class HiddenHolder:
    """The values of what was asked for."""

    unique_id: str | None = None


class NodeOutput:
    """What a node gives."""

    def __init__(self, *args: Any, ui: dict[str, Any] | None = None) -> None:
        self.args = args
        self.ui = ui


class ComfyNode:
    """The base of all nodes. Nobody makes one: its class is cloned for each run."""

    hidden: HiddenHolder = HiddenHolder()

    @classmethod
    def define_schema(cls) -> Schema:
        """What the node says of itself."""
        raise NotImplementedError
