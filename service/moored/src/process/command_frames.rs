//! Commands, in and out of frames.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes as Raw;
use engine::messages::{Command, ModelLocation, Order, StageWork, Standing, Ticket, Work};
use pipelines::{ImageRequest, InitImage, Preset, Quantization, Rung, StageInput, StageKind, StagePlan};
use residency::{Bytes, Policy};

use super::frames::FrameError;
use super::noun_frames::{
    component_in, component_out, ids_in, ids_out, need, tensor_in, tensor_out, text_in, text_out,
};
use crate::proto::worker as wire;
use crate::proto::worker::command::Command as Frame;

/// A command as it is sent.
pub(crate) fn command_out(command: &Command) -> wire::Command {
    let frame = match command {
        Command::Run(order) => Frame::Run(order_out(order)),
        Command::Cancel(ticket) => Frame::Cancel(ticket.0),
        Command::Standing(standing) => Frame::Standing(standing_out(standing)),
        Command::Unload { id, components } => Frame::Unload(wire::Unload {
            id: *id,
            components: ids_out(components),
        }),
        Command::Trim { id } => Frame::Trim(*id),
        Command::MakeRoom { id, bytes } => Frame::MakeRoom(wire::MakeRoom {
            id: *id,
            bytes: bytes.0,
        }),
        Command::Shutdown => Frame::Shutdown(wire::Shutdown {}),
    };
    wire::Command { command: Some(frame) }
}

/// What the worker reads: its configuration, once, or a command.
pub(crate) enum Incoming {
    /// The first frame.
    Configure(wire::Configure),
    /// All others.
    Command(Command),
}

/// A command as it is read.
pub(crate) fn command_in(command: wire::Command) -> Result<Incoming, FrameError> {
    Ok(Incoming::Command(match need(command.command, "a command")? {
        Frame::Configure(configure) => return Ok(Incoming::Configure(configure)),
        Frame::Run(order) => Command::Run(Box::new(order_in(order)?)),
        Frame::Cancel(ticket) => Command::Cancel(Ticket(ticket)),
        Frame::Standing(standing) => Command::Standing(standing_in(standing)),
        Frame::Unload(unload) => Command::Unload {
            id: unload.id,
            components: ids_in(unload.components),
        },
        Frame::Trim(id) => Command::Trim { id },
        Frame::MakeRoom(room) => Command::MakeRoom {
            id: room.id,
            bytes: Bytes(room.bytes),
        },
        Frame::Shutdown(wire::Shutdown {}) => Command::Shutdown,
    }))
}

fn order_out(order: &Order) -> wire::Order {
    let (load, stage) = match &order.work {
        Work::Load(components) => (components.iter().map(component_out).collect(), None),
        Work::Stage(stage) => (Vec::new(), Some(stage_out(stage))),
    };
    wire::Order {
        ticket: order.ticket.0,
        job: order.job.clone(),
        model_key: order.model.key.clone(),
        model_path: order.model.path.to_string_lossy().into_owned(),
        model_formats: order
            .model
            .quantization
            .formats()
            .map(|(component, format)| (component.to_owned(), format.to_string()))
            .collect(),
        model_copies: order
            .model
            .kept
            .iter()
            .map(|(component, path)| (component.clone(), path.to_string_lossy().into_owned()))
            .collect(),
        exclusive: order.policy == Policy::Exclusive,
        allow_low_memory: order.allow_low_memory,
        load,
        stage,
    }
}

fn quantization_in(formats: &HashMap<String, String>) -> Result<Quantization, FrameError> {
    let formats = formats
        .iter()
        .map(|(component, format)| (component.as_str(), format.as_str()));
    Quantization::of(Preset::Full, formats).map_err(|_| FrameError::Lacks("a known weight format"))
}

fn order_in(order: wire::Order) -> Result<Order, FrameError> {
    let work = match order.stage {
        Some(stage) => Work::Stage(Box::new(stage_in(stage)?)),
        None => Work::Load(order.load.into_iter().map(component_in).collect()),
    };
    Ok(Order {
        ticket: Ticket(order.ticket),
        job: order.job,
        model: ModelLocation {
            key: order.model_key,
            path: PathBuf::from(order.model_path),
            quantization: quantization_in(&order.model_formats)?,
            kept: order
                .model_copies
                .into_iter()
                .map(|(component, path)| (component, PathBuf::from(path)))
                .collect(),
        },
        work,
        policy: if order.exclusive {
            Policy::Exclusive
        } else {
            Policy::Shared
        },
        allow_low_memory: order.allow_low_memory,
    })
}

fn stage_out(work: &StageWork) -> wire::StageWork {
    let kind = match work.plan.kind {
        StageKind::EncodeText => wire::Stage::EncodeText,
        StageKind::EncodeImage => wire::Stage::EncodeImage,
        StageKind::Denoise => wire::Stage::Denoise,
        StageKind::Decode => wire::Stage::Decode,
    };
    let rung = |rung: &Rung| wire::Rung {
        label: rung.label.clone(),
        scratch: rung.scratch.0,
        approximate: rung.approximate,
    };
    wire::StageWork {
        kind: kind.into(),
        components: work.plan.components.iter().map(component_out).collect(),
        rungs: work.plan.rungs.iter().map(rung).collect(),
        shape: work.plan.shape.clone(),
        steps: work.plan.steps,
        request: Some(request_out(&work.request)),
        text: work.input.text.as_ref().map(text_out).unwrap_or_default(),
        has_text: work.input.text.is_some(),
        latent: work.input.latent.as_ref().map(tensor_out),
        preview_interval_ms: work.preview_interval_ms,
    }
}

fn stage_in(work: wire::StageWork) -> Result<StageWork, FrameError> {
    let kind = match work.kind() {
        wire::Stage::EncodeText => StageKind::EncodeText,
        wire::Stage::EncodeImage => StageKind::EncodeImage,
        wire::Stage::Denoise => StageKind::Denoise,
        wire::Stage::Decode => StageKind::Decode,
    };
    let rung = |rung: wire::Rung| Rung {
        label: rung.label,
        scratch: Bytes(rung.scratch),
        approximate: rung.approximate,
    };
    Ok(StageWork {
        plan: StagePlan {
            kind,
            components: work.components.into_iter().map(component_in).collect(),
            rungs: work.rungs.into_iter().map(rung).collect(),
            shape: work.shape,
            steps: work.steps,
        },
        request: request_in(need(work.request, "a request")?),
        input: StageInput {
            text: if work.has_text {
                Some(text_in(work.text)?)
            } else {
                None
            },
            latent: work.latent.map(tensor_in),
        },
        preview_interval_ms: work.preview_interval_ms,
    })
}

fn request_out(request: &ImageRequest) -> wire::ImageRequest {
    wire::ImageRequest {
        prompt: request.prompt.clone(),
        width: request.width,
        height: request.height,
        steps: request.steps,
        guidance: request.guidance,
        seed: request.seed,
        max_sequence_length: request.max_sequence_length,
        init_image: request.init_image.as_ref().map(|image| wire::Picture {
            width: image.width,
            height: image.height,
            rgb: Raw::from_owner(image.rgb.clone()),
        }),
        strength: request.strength,
        preview: request.preview,
    }
}

fn request_in(request: wire::ImageRequest) -> ImageRequest {
    ImageRequest {
        prompt: request.prompt,
        width: request.width,
        height: request.height,
        steps: request.steps,
        guidance: request.guidance,
        seed: request.seed,
        max_sequence_length: request.max_sequence_length,
        init_image: request.init_image.map(|image| InitImage {
            width: image.width,
            height: image.height,
            rgb: Arc::from(&image.rgb[..]),
        }),
        strength: request.strength,
        preview: request.preview,
    }
}

fn standing_out(standing: &Standing) -> wire::Standing {
    wire::Standing {
        pins: ids_out(&standing.pins),
        holds: standing
            .holds
            .iter()
            .map(|(id, components)| wire::Hold {
                id: id.clone(),
                components: ids_out(components),
            })
            .collect(),
        reservations: standing
            .reservations
            .iter()
            .map(|(id, label, bytes)| wire::Reservation {
                id: id.clone(),
                label: label.clone(),
                bytes: bytes.0,
            })
            .collect(),
    }
}

fn standing_in(standing: wire::Standing) -> Standing {
    Standing {
        pins: ids_in(standing.pins),
        holds: standing
            .holds
            .into_iter()
            .map(|hold| (hold.id, ids_in(hold.components)))
            .collect(),
        reservations: standing
            .reservations
            .into_iter()
            .map(|r| (r.id, r.label, Bytes(r.bytes)))
            .collect(),
    }
}
