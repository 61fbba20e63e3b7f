# /// script
# dependencies = []
#
# [tool.griptape-nodes]
# name = "moored_film_with_sound"
# schema_version = "0.20.0"
# engine_version_created_with = "0.98.0"
# node_libraries_referenced = [["moored", "0.1.0"]]
# node_types_used = [["moored", "MooredDiffusionModel"], ["moored", "MooredGenerateVideo"]]
# description = "A film in which somebody speaks."
# is_template = true
# is_griptape_provided = false
# is_internal = false
# creation_date = 2026-01-01T00:00:00Z
# last_modified_date = 2026-01-01T00:00:00Z
#
# ///
# ruff: noqa: E501

from griptape_nodes.retained_mode.events.connection_events import CreateConnectionRequest
from griptape_nodes.retained_mode.events.flow_events import CreateFlowRequest
from griptape_nodes.retained_mode.events.library_events import RegisterLibraryFromFileRequest
from griptape_nodes.retained_mode.events.node_events import CreateNodeRequest
from griptape_nodes.retained_mode.events.parameter_events import SetParameterValueRequest
from griptape_nodes.retained_mode.griptape_nodes import GriptapeNodes


async def build_workflow() -> None:
    await GriptapeNodes.ahandle_request(
        RegisterLibraryFromFileRequest(library_name="moored", perform_discovery_if_not_found=True)
    )
    context_manager = GriptapeNodes.ContextManager()
    if not context_manager.has_current_workflow():
        context_manager.push_workflow(file_path=__file__)
    # Create the Flow, then do work within it as context.
    flow0_name = (
        await GriptapeNodes.ahandle_request(
            CreateFlowRequest(
                parent_flow_name=None,
                flow_name="ControlFlow_1",
                set_as_new_context=False,
                metadata={},
            )
        )
    ).flow_name
    with GriptapeNodes.ContextManager().flow(flow0_name):
        node0_name = (
            await GriptapeNodes.ahandle_request(
                CreateNodeRequest(
                    node_type="MooredDiffusionModel",
                    specific_library_name="moored",
                    node_name="Diffusion Model",
                    metadata={
                        "position": {"x": 0, "y": 0},
                        "library": "moored",
                        "node_type": "MooredDiffusionModel",
                    },
                    initial_setup=True,
                )
            )
        ).node_name
        node1_name = (
            await GriptapeNodes.ahandle_request(
                CreateNodeRequest(
                    node_type="MooredGenerateVideo",
                    specific_library_name="moored",
                    node_name="Generate Video",
                    metadata={
                        "position": {"x": 700, "y": 0},
                        "library": "moored",
                        "node_type": "MooredGenerateVideo",
                    },
                    initial_setup=True,
                )
            )
        ).node_name
        await GriptapeNodes.ahandle_request(
            CreateConnectionRequest(
                source_node_name=node0_name,
                source_parameter_name="model_handle",
                target_node_name=node1_name,
                target_parameter_name="model",
                initial_setup=True,
            )
        )
        with GriptapeNodes.ContextManager().node(node0_name):
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="model",
                    node_name=node0_name,
                    value="chetwinlow1/Ovi:model_960x960.safetensors",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="quantization_mode",
                    node_name=node0_name,
                    value="auto",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="lora",
                    node_name=node0_name,
                    value="none",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="lora_strength",
                    node_name=node0_name,
                    value=1.0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="keep_alive_s",
                    node_name=node0_name,
                    value=0.0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="if_missing",
                    node_name=node0_name,
                    value="stop with an error",
                    initial_setup=True,
                    is_output=False,
                )
            )
        with GriptapeNodes.ContextManager().node(node1_name):
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="prompt",
                    node_name=node1_name,
                    value="a fisherman in an open boat at dawn looks up and says <S>The tide is turning.<E> <AUDCAP>a man speaks calmly, small waves slap against wood, gulls far away<ENDAUDCAP>",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="width",
                    node_name=node1_name,
                    value=0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="height",
                    node_name=node1_name,
                    value=0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="seconds",
                    node_name=node1_name,
                    value=0.0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="frames",
                    node_name=node1_name,
                    value=0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="fps",
                    node_name=node1_name,
                    value=0.0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="steps",
                    node_name=node1_name,
                    value=0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="randomize_seed",
                    node_name=node1_name,
                    value=False,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="seed",
                    node_name=node1_name,
                    value=42,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="max_sequence_length",
                    node_name=node1_name,
                    value=0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="negative_prompt",
                    node_name=node1_name,
                    value="",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="detach",
                    node_name=node1_name,
                    value=True,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="previews",
                    node_name=node1_name,
                    value=True,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="output_file",
                    node_name=node1_name,
                    value="film.mp4",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="was_successful",
                    node_name=node1_name,
                    value=False,
                    initial_setup=True,
                    is_output=False,
                )
            )
