# /// script
# dependencies = []
#
# [tool.griptape-nodes]
# name = "moored_generate_audio"
# schema_version = "0.20.0"
# engine_version_created_with = "0.98.0"
# node_libraries_referenced = [["moored", "0.1.0"]]
# node_types_used = [["moored", "MooredDiffusionModel"], ["moored", "MooredGPUConfiguration"], ["moored", "MooredGenerateAudio"]]
# description = "A melody from a prompt, within limits."
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
                    node_type="MooredGPUConfiguration",
                    specific_library_name="moored",
                    node_name="GPU Configuration",
                    metadata={
                        "position": {"x": 0, "y": 600},
                        "library": "moored",
                        "node_type": "MooredGPUConfiguration",
                    },
                    initial_setup=True,
                )
            )
        ).node_name
        node2_name = (
            await GriptapeNodes.ahandle_request(
                CreateNodeRequest(
                    node_type="MooredGenerateAudio",
                    specific_library_name="moored",
                    node_name="Generate Audio",
                    metadata={
                        "position": {"x": 700, "y": 0},
                        "library": "moored",
                        "node_type": "MooredGenerateAudio",
                    },
                    initial_setup=True,
                )
            )
        ).node_name
        await GriptapeNodes.ahandle_request(
            CreateConnectionRequest(
                source_node_name=node0_name,
                source_parameter_name="model_handle",
                target_node_name=node2_name,
                target_parameter_name="model",
                initial_setup=True,
            )
        )
        await GriptapeNodes.ahandle_request(
            CreateConnectionRequest(
                source_node_name=node1_name,
                source_parameter_name="system_constraints",
                target_node_name=node2_name,
                target_parameter_name="system_constraints",
                initial_setup=True,
            )
        )
        with GriptapeNodes.ContextManager().node(node0_name):
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="model",
                    node_name=node0_name,
                    value="moored/demo-sound",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="quantization_mode",
                    node_name=node0_name,
                    value="None",
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
                    parameter_name="gpu_device",
                    node_name=node1_name,
                    value="any",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="gpu_memory_fraction",
                    node_name=node1_name,
                    value=0.8,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="cpu_memory_gb",
                    node_name=node1_name,
                    value=16.0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="allow_low_memory",
                    node_name=node1_name,
                    value=False,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="release_patience_s",
                    node_name=node1_name,
                    value=7.0,
                    initial_setup=True,
                    is_output=False,
                )
            )
        with GriptapeNodes.ContextManager().node(node2_name):
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="prompt",
                    node_name=node2_name,
                    value="three high short notes, then a low long one, square wave",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="lyrics",
                    node_name=node2_name,
                    value="",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="seconds",
                    node_name=node2_name,
                    value=0.0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="task",
                    node_name=node2_name,
                    value="new track",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="start_seconds",
                    node_name=node2_name,
                    value=0.0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="end_seconds",
                    node_name=node2_name,
                    value=0.0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="tracks",
                    node_name=node2_name,
                    value="",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="bpm",
                    node_name=node2_name,
                    value=0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="key",
                    node_name=node2_name,
                    value="",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="time_signature",
                    node_name=node2_name,
                    value="",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="language",
                    node_name=node2_name,
                    value="",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="steps",
                    node_name=node2_name,
                    value=0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="randomize_seed",
                    node_name=node2_name,
                    value=False,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="seed",
                    node_name=node2_name,
                    value=42,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="max_sequence_length",
                    node_name=node2_name,
                    value=0,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="negative_prompt",
                    node_name=node2_name,
                    value="",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="detach",
                    node_name=node2_name,
                    value=True,
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="file_format",
                    node_name=node2_name,
                    value="wav",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="output_file",
                    node_name=node2_name,
                    value="track.wav",
                    initial_setup=True,
                    is_output=False,
                )
            )
            await GriptapeNodes.ahandle_request(
                SetParameterValueRequest(
                    parameter_name="was_successful",
                    node_name=node2_name,
                    value=False,
                    initial_setup=True,
                    is_output=False,
                )
            )
