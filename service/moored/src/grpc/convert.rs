//! Conversion of engine types to protocol types.

use std::collections::HashMap;

use api::v1;
use api::v1::event::Event as Kind;
use engine::job::{JobEvent, JobEventKind, JobReport, LatentInfo, Priority, StageReport};
use engine::library::{Entry, OpenModel};
use engine::queue::JobInfo;
use engine::{Change, ChangedTo, Fallback};
use gpu::WeightFormat;
use pipelines::{AdapterReport, FULL, LeftOut, Medium, Request, ValueShape};
use residency::{Component, Fits, Holder, MemorySummary};

use super::residency::{freed_out, kept_out};
use super::status::cut;
use crate::durations::millis;

pub(super) fn component_out(component: &Component) -> v1::Component {
    v1::Component {
        id: component.id.to_string(),
        name: component.name.clone(),
        bytes: component.bytes.0,
    }
}

pub(super) fn holder_out(holder: &Holder) -> v1::Holder {
    v1::Holder {
        name: holder.name.clone(),
        pid: holder.pid.unwrap_or(0),
        bytes: holder.bytes.0,
    }
}

pub(super) fn fallback_out(fallback: &Fallback) -> v1::Fallback {
    v1::Fallback {
        label: fallback.change.label.clone(),
        peak_bytes: fallback.peak.0,
        fits_now: fallback.fits == Fits::Now,
        change: Some(change_out(&fallback.change)),
    }
}

fn change_out(change: &Change) -> v1::fallback::Change {
    use v1::fallback::Change as Out;
    match &change.to {
        ChangedTo::Quantization(quantization) => {
            let (preset, components) = quantization.parts();
            let word =
                |format: Option<WeightFormat>| format.map_or(FULL.to_owned(), |format| format.to_string());
            Out::Quantization(v1::Quantization {
                preset: preset.as_str().to_owned(),
                components: components
                    .map(|(name, format)| (name.to_owned(), word(format)))
                    .collect(),
            })
        }
        ChangedTo::Request(request) => {
            let (width, height) = request.medium.size().unwrap_or_default();
            let mut size = v1::ResultSize {
                width,
                height,
                ..Default::default()
            };
            match &request.medium {
                Medium::Image(_) => {}
                Medium::Video(video) => size.frames = video.frames,
                Medium::Audio(audio) => size.seconds = audio.seconds,
            }
            Out::Size(size)
        }
        ChangedTo::Components(names) => Out::Components(v1::ComponentNames { names: names.clone() }),
        ChangedTo::Unpinned(keys) => Out::Unpinned(v1::EntryKeys { keys: keys.clone() }),
        ChangedTo::Bytes(bytes) => Out::Bytes(bytes.0),
    }
}

/// A card's memory, account by account.
pub(super) fn memory_out(memory: &MemorySummary) -> v1::MemoryAccounts {
    let accounts = &memory.accounts;
    v1::MemoryAccounts {
        total: memory.total.0,
        components: accounts.components.0,
        scratch: accounts.scratch.0,
        slack: accounts.slack.0,
        workspaces: accounts.workspaces.0,
        context: accounts.context.0,
        foreign: accounts.foreign.0,
        unexplained: accounts.unexplained.0,
        free: accounts.free.0,
        usable: memory.usable.0,
    }
}

pub(super) fn latent_out(info: &LatentInfo) -> v1::LatentInfo {
    v1::LatentInfo {
        id: info.id.clone(),
        shape: info.values.first().map_or(Vec::new(), shape_out),
        dtype: "f32".to_owned(),
        vae_id: info.decoder_id.clone(),
        expires_in_ms: millis(info.expires_in),
        bytes: info.bytes.0,
        tensors: info.values.iter().map(tensor_out).collect(),
    }
}

fn tensor_out(value: &ValueShape) -> v1::TensorInfo {
    v1::TensorInfo {
        name: value.name.clone(),
        shape: shape_out(value),
    }
}

/// What a request takes where it leaves a field open.
pub(super) fn defaults_out(defaults: &Request) -> v1::ModelDefaults {
    let (width, height) = defaults.medium.size().unwrap_or_default();
    let mut out = v1::ModelDefaults {
        steps: defaults.steps,
        guidance: defaults.guidance,
        max_sequence_length: defaults.max_sequence_length,
        width,
        height,
        ..Default::default()
    };
    match &defaults.medium {
        Medium::Image(_) => {}
        Medium::Video(video) => {
            (out.frames, out.frames_per_second) = (video.frames, video.frames_per_second);
        }
        Medium::Audio(audio) => out.seconds = audio.seconds,
    }
    out
}

/// Sides of a tensor.
fn shape_out(value: &ValueShape) -> Vec<u32> {
    let sides = value.shape.iter();
    sides.map(|&n| u32::try_from(n).unwrap_or(u32::MAX)).collect()
}

/// The format that each component is held in: `full`, `nf4`, `Q4_K`.
pub(super) fn formats_out(open: &OpenModel) -> HashMap<String, String> {
    let format = |name: &str| open.model.format_of(name).map(|format| format.to_string());
    let components = open.components.iter();
    components
        .map(|c| {
            let format = format(&c.name).unwrap_or_else(|| FULL.to_owned());
            (c.name.clone(), format)
        })
        .collect()
}

/// An entry as it was opened.
pub(super) fn resolved(entry: &Entry, open: &OpenModel) -> v1::ResolvedModel {
    v1::ResolvedModel {
        key: entry.key.clone(),
        id: entry.id.clone(),
        revision: entry.revision.clone(),
        family: open.model.family().to_owned(),
        quantization: formats_out(open),
        choice: String::new(),
        adapters: open.model.adapters().into_iter().map(adapter_out).collect(),
    }
}

/// Of a name in a file of others; errors cut theirs too.
const LONGEST_NAME_CHARACTERS: usize = 300;
/// Most names of ignored tensors that are told.
const IGNORED_TOLD: usize = 100;

fn adapter_out(report: AdapterReport) -> v1::AttachedAdapter {
    let ignored_count = report.ignored.len() as u32;
    let ignored = report.ignored.iter().take(IGNORED_TOLD);
    let ignored = ignored.map(|name| cut(name, LONGEST_NAME_CHARACTERS)).collect();
    v1::AttachedAdapter {
        ignored,
        id: report.name,
        layers: report
            .layers
            .into_iter()
            .map(|(component, layers)| (component, layers as u32))
            .collect(),
        rank: report.rank as u32,
        ignored_count,
    }
}

pub(super) fn priority_in(priority: i32) -> Priority {
    match v1::Priority::try_from(priority) {
        Ok(v1::Priority::Low) => Priority::Low,
        Ok(v1::Priority::High) => Priority::High,
        Ok(v1::Priority::Normal | v1::Priority::Unspecified) | Err(_) => Priority::Normal,
    }
}

fn priority_out(priority: Priority) -> i32 {
    match priority {
        Priority::Low => v1::Priority::Low,
        Priority::Normal => v1::Priority::Normal,
        Priority::High => v1::Priority::High,
    }
    .into()
}

pub(super) fn job_out(job: &JobInfo) -> v1::JobInfo {
    v1::JobInfo {
        id: job.id.to_string(),
        client_id: job.client.clone(),
        priority: priority_out(job.priority),
        state: job.state.as_str().to_owned(),
        kind: job.call.as_str().to_owned(),
        model_key: job.model_key.clone(),
        card: job.card.clone(),
        stage: job.stage.to_string(),
        step: job.step,
        steps: job.steps,
        queue_position: job.position,
        age_ms: millis(job.age),
        error: job.error.as_ref().map(ToString::to_string).unwrap_or_default(),
    }
}

/// An event of the protocol with this kind.
pub(super) fn event(job_id: &str, at_ms: u64, kind: Kind) -> v1::Event {
    v1::Event {
        job_id: job_id.to_owned(),
        at_ms,
        event: Some(kind),
    }
}

/// What to do with a job event.
pub(super) enum Converted {
    /// Send it as it is.
    Event(Box<Kind>),
    /// Encode its pixels or samples first.
    Media,
    /// End the stream with an error.
    Failed(engine::Error),
}

/// Converts an event. Pictures and previews are left to the caller, who encodes them.
pub(super) fn convert(event: &JobEvent, model: &v1::ResolvedModel) -> Converted {
    Converted::Event(Box::new(match &event.kind {
        JobEventKind::Accepted { joined } => Kind::Accepted(v1::Accepted {
            model: Some(model.clone()),
            joined: *joined,
            left_out: Vec::new(), // told by the stream, which knows the request
        }),
        JobEventKind::Queued { position, estimate } => Kind::Queued(v1::Queued {
            position: *position,
            estimate_ms: estimate.map(millis),
        }),
        JobEventKind::Waiting {
            stage,
            needed,
            free,
            holders,
            patience_left,
            cause,
        } => Kind::Waiting(v1::Waiting {
            needed_bytes: needed.0,
            free_bytes: free.0,
            holders: holders.iter().map(holder_out).collect(),
            patience_left_ms: millis(*patience_left),
            cause: (*cause).to_owned(),
            stage: stage.to_string(),
        }),
        JobEventKind::Evicting { component, card } => Kind::Evicting(v1::Evicting {
            component: Some(component_out(component)),
            card: card.clone(),
        }),
        JobEventKind::Loading {
            component,
            done,
            card,
        } => Kind::Loading(v1::Loading {
            component: Some(component_out(component)),
            bytes_done: done.0,
            bytes_total: component.bytes.0,
            card: card.clone(),
        }),
        JobEventKind::Retrying {
            reason,
            message,
            stage,
        } => Kind::Retrying(v1::Retrying {
            reason: reason.clone(),
            message: message.clone(),
            stage: stage.to_string(),
        }),
        JobEventKind::Stage {
            name,
            index,
            of,
            chunking,
            cached,
            card,
            item,
            memory,
            section,
        } => Kind::Stage(v1::StageStarted {
            name: name.to_string(),
            index: *index,
            of: *of,
            chunking: chunking.clone(),
            cached: *cached,
            card: card.clone(),
            item: *item,
            memory: memory.as_ref().map(memory_out),
            part: section.map_or(0, |section| section.number),
            parts: section.map_or(0, |section| section.of),
        }),
        JobEventKind::Step { n, of, item, section } => Kind::Step(v1::Step {
            n: *n,
            of: *of,
            item: *item,
            part: section.map_or(0, |section| section.number),
            parts: section.map_or(0, |section| section.of),
        }),
        JobEventKind::Latent { info, item } => Kind::Latent(v1::LatentKept {
            latent: Some(latent_out(info)),
            item: *item,
        }),
        JobEventKind::Done(report) => Kind::Done(done_out(report, model)),
        JobEventKind::Preview { .. } | JobEventKind::Piece { .. } => return Converted::Media,
        JobEventKind::Failed(error) => return Converted::Failed(error.clone()),
    }))
}

/// The end of a text that a model does not read.
pub(super) fn left_out_out(left_out: &LeftOut) -> v1::TextLeftOut {
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    v1::TextLeftOut {
        field: left_out.field.to_owned(),
        tokens: number(left_out.tokens),
        limit: number(left_out.limit),
        message: left_out.to_string(),
    }
}

fn done_out(report: &JobReport, model: &v1::ResolvedModel) -> v1::Done {
    v1::Done {
        seed: report.seed,
        stages: report.stages.iter().map(stage_out).collect(),
        resident_already: report.resident_already.clone(),
        approximations: report.approximations.clone(),
        total_ms: millis(report.total),
        model: Some(model.clone()),
        freed: report.freed.iter().map(freed_out).collect(),
        kept: report.kept.iter().map(kept_out).collect(),
        left_out: Vec::new(), // told by the stream, which knows the request
    }
}

fn stage_out(stage: &StageReport) -> v1::StageReport {
    v1::StageReport {
        name: stage.name.to_string(),
        run_ms: millis(stage.run),
        move_ms: millis(stage.moves),
        wait_ms: millis(stage.wait),
        peak_scratch_bytes: stage.peak_scratch.0,
        peak_bytes: stage.peak_bytes.0,
        predicted_scratch_bytes: stage.predicted_scratch.0,
        chunking: stage.chunking.clone(),
        cached: stage.cached,
        item: stage.item,
        card: stage.card.clone(),
        attention: stage.attention.clone(),
        before: stage.memory.map(|memory| memory_out(&memory.before)),
        after: stage.memory.map(|memory| memory_out(&memory.after)),
        largest_block_bytes: stage
            .memory
            .and_then(|memory| memory.largest_block)
            .map_or(0, |bytes| bytes.0),
    }
}
