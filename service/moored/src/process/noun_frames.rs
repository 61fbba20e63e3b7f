//! The nouns that commands and events share, in and out of frames.

use std::sync::Arc;

use bytes::Bytes as Raw;
use gpu::MemoryProfile;
use pipelines::{EncodedText, HostTensor, HostType};
use residency::{Bytes, Component, ComponentId, Holder};

use super::frames::FrameError;
use crate::proto::worker as wire;

/// A field that protobuf makes optional and the protocol does not.
pub(super) fn need<T>(field: Option<T>, name: &'static str) -> Result<T, FrameError> {
    field.ok_or(FrameError::Lacks(name))
}

pub(super) fn component_out(component: &Component) -> wire::Component {
    wire::Component {
        id: component.id.to_string(),
        name: component.name.clone(),
        bytes: component.bytes.0,
        reload_seconds: component.reload_seconds,
    }
}

pub(super) fn component_in(component: wire::Component) -> Component {
    Component {
        id: ComponentId::new(component.id),
        name: component.name,
        bytes: Bytes(component.bytes),
        reload_seconds: component.reload_seconds,
    }
}

pub(super) fn memory_out(profile: &MemoryProfile) -> wire::MemoryProfile {
    wire::MemoryProfile {
        release_threshold: profile.release_threshold.map(|bytes| bytes.0),
        slack_limit: profile.slack_limit.0,
        staging: profile.staging_bytes.0,
        staging_chunk: profile.staging_chunk.0,
    }
}

pub(super) fn memory_in(profile: &wire::MemoryProfile) -> MemoryProfile {
    MemoryProfile {
        release_threshold: profile.release_threshold.map(Bytes),
        slack_limit: Bytes(profile.slack_limit),
        staging_bytes: Bytes(profile.staging),
        staging_chunk: Bytes(profile.staging_chunk),
    }
}

pub(super) fn ids_out(ids: &[ComponentId]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}

pub(super) fn ids_in(ids: Vec<String>) -> Vec<ComponentId> {
    ids.into_iter().map(ComponentId::new).collect()
}

pub(super) fn holders_out(holders: &[Holder]) -> Vec<wire::Holder> {
    holders
        .iter()
        .map(|h| wire::Holder {
            name: h.name.clone(),
            pid: h.pid,
            bytes: h.bytes.0,
        })
        .collect()
}

pub(super) fn holders_in(holders: Vec<wire::Holder>) -> Vec<Holder> {
    holders
        .into_iter()
        .map(|h| Holder {
            name: h.name,
            pid: h.pid,
            bytes: Bytes(h.bytes),
        })
        .collect()
}

pub(super) fn tensor_out(tensor: &HostTensor) -> wire::HostTensor {
    let dtype = match tensor.dtype {
        HostType::F32 => wire::HostType::F32,
        HostType::F16 => wire::HostType::F16,
        HostType::Bf16 => wire::HostType::Bf16,
    };
    wire::HostTensor {
        dtype: dtype.into(),
        shape: tensor.shape.iter().map(|&n| n as u64).collect(),
        data: Raw::from_owner(tensor.data.clone()),
    }
}

pub(super) fn tensor_in(tensor: wire::HostTensor) -> HostTensor {
    let dtype = match tensor.dtype() {
        wire::HostType::F32 => HostType::F32,
        wire::HostType::F16 => HostType::F16,
        wire::HostType::Bf16 => HostType::Bf16,
    };
    HostTensor {
        dtype,
        shape: tensor
            .shape
            .iter()
            .map(|&n| usize::try_from(n).unwrap_or(usize::MAX))
            .collect(),
        data: Arc::from(&tensor.data[..]),
    }
}

pub(super) fn text_out(text: &EncodedText) -> Vec<wire::NamedTensor> {
    text.tensors
        .iter()
        .map(|(name, tensor)| wire::NamedTensor {
            name: name.clone(),
            tensor: Some(tensor_out(tensor)),
        })
        .collect()
}

pub(super) fn text_in(tensors: Vec<wire::NamedTensor>) -> Result<EncodedText, FrameError> {
    let tensors = tensors
        .into_iter()
        .map(|named| Ok((named.name, tensor_in(need(named.tensor, "an encoding")?))))
        .collect::<Result<_, FrameError>>()?;
    Ok(EncodedText { tensors })
}
