//! Converts answers of calls to messages of the protocol.

use api::v1;
use api::v1::event::Event as Kind;
use calls::{
    Chunk, EventKind, KeptMedia, LONGEST_TEXT_CHARACTERS, ListedModel, MOST_LISTED, Plan, ResolvedModel,
    ServiceStatus, millis, paths, policy_name, words_of,
};
use engine::job::{JobEventKind, JobReport, LatentInfo, Priority, StageReport};
use engine::queue::{CardStatus, JobInfo, PlannedStage, StatusReport, Streamed};
use engine::{Change, ChangedTo, Fallback, Freed, Kept, Shortfall};
use gpu::{CardKind, WeightFormat};
use model::{AdapterReport, FULL, LeftOut, MediaFormat, Medium, Request, Sound, ValueShape};
use residency::{Component, Fits, Holder, MemorySummary, Move, Part, Resident, ResidentState};
use wording::cut;

pub(crate) fn component_out(component: &Component) -> v1::Component {
    v1::Component {
        id: component.id.to_string(),
        name: component.name.clone(),
        bytes: component.bytes.0,
    }
}

pub(crate) fn holder_out(holder: &Holder) -> v1::Holder {
    v1::Holder {
        name: paths::relative(&holder.name), // programs are named by their files
        pid: holder.pid.unwrap_or(0),
        bytes: holder.bytes.0,
    }
}

pub(crate) fn fallback_out(fallback: &Fallback) -> v1::Fallback {
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
pub(crate) fn memory_out(memory: &MemorySummary) -> v1::MemoryAccounts {
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

pub(crate) fn latent_out(info: &LatentInfo) -> v1::LatentInfo {
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

/// The values of fields that a request does not set.
pub(crate) fn defaults_out(defaults: &Request) -> v1::ModelDefaults {
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

/// An entry as it was opened.
pub(crate) fn resolved_out(model: &ResolvedModel) -> v1::ResolvedModel {
    v1::ResolvedModel {
        key: model.key.clone(),
        id: model.id.clone(),
        revision: model.revision.clone(),
        family: model.family.clone(),
        quantization: model.formats.clone().into_iter().collect(),
        choice: model.choice.clone(),
        adapters: model.adapters.iter().map(adapter_out).collect(),
    }
}

/// Most names of ignored tensors in an answer.
const MOST_IGNORED: usize = 100;

fn adapter_out(report: &AdapterReport) -> v1::AttachedAdapter {
    let ignored_count = report.ignored.len() as u32;
    let ignored = report.ignored.iter().take(MOST_IGNORED);
    let ignored = ignored
        .map(|name| cut(name, LONGEST_TEXT_CHARACTERS).into_owned())
        .collect();
    v1::AttachedAdapter {
        ignored,
        id: report.name.clone(),
        layers: report
            .layers
            .iter()
            .map(|(component, layers)| (component.clone(), *layers as u32))
            .collect(),
        rank: report.rank as u32,
        ignored_count,
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

pub(crate) fn job_out(job: &JobInfo) -> v1::JobInfo {
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
        error: job.error.as_ref().map(words_of).unwrap_or_default(),
        results_for_ms: None,
    }
}

/// An event of the protocol with this kind.
pub(crate) fn event(job_id: &str, at_ms: u64, kind: Kind) -> v1::Event {
    v1::Event {
        job_id: job_id.to_owned(),
        at_ms,
        event: Some(kind),
    }
}

/// Data that every job of one call sends besides its events.
pub(crate) struct OfJob<'a> {
    pub(crate) model: &'a v1::ResolvedModel,
    pub(crate) left_out: &'a [v1::TextLeftOut],
}

/// An event of a call.
pub(crate) fn kind_out(kind: EventKind, of: &OfJob<'_>) -> Option<Kind> {
    match kind {
        EventKind::Job(kind) => job_kind_out(&kind, of),
        EventKind::Preview { step, item, jpeg } => Some(Kind::Preview(v1::Preview { jpeg, step, item })),
        EventKind::Chunk(chunk) => Some(Kind::Artifact(chunk_out(chunk))),
    }
}

/// An event of a job. Pixels, samples and errors are converted elsewhere.
pub(crate) fn job_kind_out(kind: &JobEventKind, of: &OfJob<'_>) -> Option<Kind> {
    Some(match kind {
        JobEventKind::Accepted { joined } => Kind::Accepted(v1::Accepted {
            model: Some(of.model.clone()),
            joined: *joined,
            left_out: of.left_out.to_vec(),
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
            message: paths::relative(message),
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
        JobEventKind::Done(report) => Kind::Done(done_out(report, of)),
        JobEventKind::Preview { .. } | JobEventKind::Piece { .. } | JobEventKind::Failed(_) => return None,
    })
}

/// Bytes of a result.
fn chunk_out(chunk: Chunk) -> v1::Artifact {
    let head = chunk
        .head
        .map(|head| (head.metadata, artifact_format(head.format)));
    let (metadata, format) = head.unzip();
    v1::Artifact {
        index: chunk.item,
        media_type: chunk.media_type.into_owned(),
        metadata: metadata.unwrap_or_default(),
        chunk: chunk.data,
        total_bytes: chunk.total_bytes,
        last: chunk.is_last,
        track: chunk.track,
        offset: Some(chunk.offset),
        format,
    }
}

/// A format, in the `oneof` of the messages that have one.
macro_rules! format_out {
    ($oneof:path, $format:expr) => {{
        use $oneof as Out;
        match $format {
            MediaFormat::Image { width, height } => Out::Image(v1::ImageFormat { width, height }),
            MediaFormat::Video {
                width,
                height,
                frames,
                frames_per_second,
                sound,
            } => Out::Video(v1::VideoFormat {
                width,
                height,
                frames,
                frames_per_second,
                sound: sound.map(track_format),
            }),
            MediaFormat::Audio {
                samples_per_second,
                channels,
                samples,
            } => Out::Audio(track_format(Sound {
                samples_per_second,
                channels,
                samples,
            })),
        }
    }};
}

fn track_format(sound: Sound) -> v1::AudioTrackFormat {
    v1::AudioTrackFormat {
        samples_per_second: sound.samples_per_second,
        channels: sound.channels,
        samples: sound.samples,
    }
}

fn artifact_format(format: MediaFormat) -> v1::artifact::Format {
    format_out!(v1::artifact::Format, format)
}

/// Stored media.
pub(crate) fn media_out(media: KeptMedia) -> v1::MediaInfo {
    v1::MediaInfo {
        id: media.id,
        media_type: media.media_type.to_owned(),
        format: media
            .format
            .map(|format| format_out!(v1::media_info::Format, format)),
        bytes: media.bytes,
        expires_in_ms: millis(media.ttl),
    }
}

/// The end of a text that a model does not read.
pub(crate) fn left_out_out(left_out: &LeftOut) -> v1::TextLeftOut {
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    v1::TextLeftOut {
        field: left_out.field.clone().into_owned(),
        tokens: number(left_out.tokens),
        limit: number(left_out.limit),
        message: left_out.to_string(),
    }
}

pub(crate) fn done_out(report: &JobReport, of: &OfJob<'_>) -> v1::Done {
    v1::Done {
        seed: report.seed,
        stages: report.stages.iter().map(stage_out).collect(),
        resident_already: report.resident_already.clone(),
        approximations: report.approximations.clone(),
        total_ms: millis(report.total),
        model: Some(of.model.clone()),
        freed: report.freed.iter().map(freed_out).collect(),
        kept: report.kept.iter().map(kept_out).collect(),
        left_out: of.left_out.to_vec(),
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
        passes_left_out: stage.passes_left_out.map_or(0, |passes| passes.left_out),
        passes: stage.passes_left_out.map_or(0, |passes| passes.of),
    }
}

/// The state of the service.
pub(crate) fn status_out(status: &ServiceStatus) -> v1::Status {
    let report = &status.report;
    v1::Status {
        cards: report
            .cards
            .iter()
            .zip(&status.workers)
            .map(|(card, &worker_pid)| v1::CardStatus {
                worker_pid,
                policy: policy_name(status.policy).to_owned(),
                ..card_out(card, report)
            })
            .collect(),
        jobs: report.jobs.iter().map(job_out).collect(),
        latents: u32::try_from(report.latents).unwrap_or(u32::MAX),
        latent_bytes: report.latent_bytes.0,
        text_encodings: u32::try_from(report.texts).unwrap_or(u32::MAX),
        text_encoding_bytes: report.text_bytes.0,
        uptime_ms: millis(status.uptime),
        host: Some(v1::HostMemory {
            total_bytes: status.host.total.0,
            available_bytes: status.host.available.0,
            service_bytes: status.host.service.0,
            workers_bytes: status.host.workers.0,
        }),
    }
}

/// A model that requests can name.
pub(crate) fn listed_out(listed: &ListedModel) -> v1::ModelInfo {
    let info = v1::ModelInfo {
        id: listed.id.clone(),
        revision: listed.revision.clone(),
        is_default: listed.is_default,
        ..Default::default()
    };
    let details = match &listed.details {
        Ok(details) => details,
        Err(problem) => {
            return v1::ModelInfo {
                problem: problem.clone(),
                ..info
            };
        }
    };
    let choices = details.choices.iter();
    v1::ModelInfo {
        family: details.family.clone(),
        media: details.defaults.medium.name().to_owned(),
        defaults: Some(defaults_out(&details.defaults)),
        resident: details.resident.clone(),
        components: details.components.iter().map(component_out).collect(),
        pinned: details.pinned,
        quantization: details.formats.clone().into_iter().collect(),
        choices: choices
            .map(|(preset, bytes)| v1::QuantizationChoice {
                preset: preset.as_str().to_owned(),
                bytes: *bytes,
            })
            .collect(),
        ..info
    }
}

/// The plan of a request.
pub(crate) fn plan_out(plan: &Plan) -> v1::PlanResponse {
    let report = &plan.report;
    v1::PlanResponse {
        model: Some(resolved_out(&plan.model)),
        card: report.card.clone(),
        stages: report.stages.iter().map(planned_out).collect(),
        runs_now: report.runs_now,
        predicted_move_seconds: report.predicted_move_seconds,
        upgrades: report.upgrades.iter().map(fallback_out).collect(),
    }
}

/// Name of a kind of card: `cpu`, `simulated` or `cuda`.
pub(crate) fn card_kind_out(kind: CardKind) -> String {
    match kind {
        CardKind::Cpu => "cpu",
        CardKind::Simulated => "simulated",
        CardKind::Cuda => "cuda",
    }
    .to_owned()
}

fn card_out(card: &CardStatus, report: &StatusReport) -> v1::CardStatus {
    v1::CardStatus {
        id: card.description.id.clone(),
        name: card.description.name.clone(),
        kind: card_kind_out(card.description.kind),
        attention: card.attention.clone(),
        state: card.state.as_str().to_owned(),
        memory: Some(memory_out(&card.ledger.summary())),
        residents: card
            .ledger
            .residents()
            .map(|resident| resident_out(resident, card, report))
            .collect(),
        holders: card.ledger.holders().iter().map(holder_out).collect(),
        reservations: card
            .reservations
            .iter()
            .map(|reservation| v1::Reservation {
                id: reservation.id.clone(),
                label: reservation.by.label.clone(),
                bytes: reservation.bytes.0,
                expires_in_ms: millis(reservation.expires_in),
                process_id: reservation.by.process.unwrap_or(0),
            })
            .collect(),
        worker_restarts: card.restarts,
        on_host: card
            .ledger
            .host()
            .components
            .values()
            .map(|share| v1::HostComponent {
                component: Some(component_out(&share.component)),
                bytes: share.bytes.0,
                entries: entries_of(&share.component, report),
            })
            .collect(),
        host_limit_bytes: card.ledger.host().limit.map_or(0, |limit| limit.0),
        problem: card.problem.clone(),
        job_id: card.job.as_ref().map(ToString::to_string).unwrap_or_default(),
        ..Default::default()
    }
}

fn resident_out(resident: &Resident, card: &CardStatus, report: &StatusReport) -> v1::ResidentComponent {
    let state = match resident.state {
        ResidentState::Loading | ResidentState::Resizing => "loading",
        ResidentState::Resident => "resident",
        ResidentState::Evicting => "evicting",
    };
    v1::ResidentComponent {
        component: Some(component_out(&resident.component)),
        state: state.to_owned(),
        leases: resident.leases,
        pinned: resident.pinned,
        held: resident.held > 0,
        idle_ms: card.ledger_now.since(resident.last_used),
        entries: entries_of(&resident.component, report),
        streamed: card
            .streamed
            .iter()
            .find(|streamed| streamed.component.id == resident.component.id)
            .map(streamed_out),
    }
}

/// The keys of the entries that use a component.
fn entries_of(component: &Component, report: &StatusReport) -> Vec<String> {
    report.users.get(&component.id).cloned().unwrap_or_default()
}

/// A component of which a part is on the card.
fn streamed_out(streamed: &Streamed) -> v1::StreamedComponent {
    let component = &streamed.component;
    let size = component.size_of(streamed.part);
    v1::StreamedComponent {
        name: component.name.clone(),
        whole_bytes: component.bytes.0,
        resident_bytes: size.bytes.0,
        streamed_bytes: size.streamed.0,
        streamed_once_bytes: size.streamed_once.0,
        link_bytes_per_second: streamed.link.map_or(0, |link| link.0),
        more_seconds: streamed.more_seconds,
        words: streamed.to_string(),
    }
}

pub(crate) fn freed_out(freed: &Freed) -> v1::FreedComponent {
    v1::FreedComponent {
        component: Some(component_out(&freed.component)),
        card: freed.card.clone(),
        booked_bytes: freed.booked.0,
        freed_bytes: freed.freed.0,
    }
}

pub(crate) fn kept_out(kept: &Kept) -> v1::KeptComponent {
    v1::KeptComponent {
        component: Some(component_out(&kept.component)),
        card: kept.card.clone(),
        reason: kept.reason.to_string(),
        cause: kept.reason.as_str().to_owned(),
        by: kept.reason.by().to_owned(),
    }
}

fn planned_out(stage: &PlannedStage) -> v1::PlannedStage {
    v1::PlannedStage {
        name: stage.name.to_string(),
        components: stage.components.iter().map(component_out).collect(),
        resident_already: stage.resident_already.clone(),
        component_bytes: stage.component_bytes.0,
        scratch_bytes: stage.scratch.0,
        scratch_learned: stage.scratch_learned,
        moves: stage.moves.iter().map(move_out).collect(),
        verdict: stage.verdict.as_str().to_owned(),
        shortfall: stage.shortfall.as_ref().map(shortfall_out),
        chunking: stage.chunking.clone(),
        approximate: stage.approximate,
        streamed: stage.streamed.iter().map(streamed_out).collect(),
    }
}

fn move_out(planned: &Move) -> String {
    match planned {
        Move::Evict(component) => format!("evict {} ({})", component.name, component.bytes),
        Move::Load(component, part) if *part == Part::WHOLE => {
            format!("load {} ({})", component.name, component.bytes)
        }
        Move::Load(component, part) => format!(
            "load {} of {} ({}), and stream the rest",
            component.bytes_of(*part),
            component.name,
            component.bytes
        ),
        Move::Resize(component, part) => format!(
            "keep {} of {} ({})",
            component.bytes_of(*part),
            component.name,
            component.bytes
        ),
        Move::Trim => "trim".to_owned(),
    }
}

/// The shortfall in errors and plans.
pub(crate) fn shortfall_out(shortfall: &Shortfall) -> v1::MemoryShortfall {
    v1::MemoryShortfall {
        needed_bytes: shortfall.needed.0,
        free_bytes: shortfall.free.0,
        capacity_bytes: shortfall.capacity.0,
        holders: shortfall
            .holders
            .iter()
            .take(MOST_LISTED)
            .map(holder_out)
            .collect(),
        fallbacks: shortfall
            .fallbacks
            .iter()
            .take(MOST_LISTED)
            .map(fallback_out)
            .collect(),
        stage: shortfall.stage.clone(),
    }
}
