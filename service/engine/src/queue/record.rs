//! One job as the queue keeps it: what it wants, how far it is, what it has made, who listens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pipelines::{EncodedText, HostTensor, ImageRequest, Rung, StageInput, StageKind, StagePlan};
use residency::{Bytes, Component, Policy, StageNeed, Wait};
use tokio::time::Instant;

use super::listener::{Mailbox, is_coalescible};
use super::reductions::Reductions;
use super::request::OpenModels;
use super::swap::Swap;
use crate::error::{Error, Shortfall};
use crate::job::{JobEvent, JobEventKind, JobId, JobOptions, JobReport, JobWork};
use crate::library::Entry;
use crate::messages::Shortage;

/// What one order is sent for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepKind {
    Stage(StageKind),
    Load,
    /// What a swap that failed had displaced comes back.
    Restore,
}

impl StepKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            StepKind::Stage(kind) => kind.name(),
            StepKind::Load => "load",
            StepKind::Restore => "restore",
        }
    }
}

/// A step of a job, and the picture that it is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) kind: StepKind,
    pub(super) picture: u32,
}

/// What a step needs on a card.
#[derive(Clone, Debug)]
pub(super) struct Need {
    pub(super) name: &'static str,
    pub(super) components: Vec<Component>,
    pub(super) rungs: Vec<Rung>,
    /// None for a load.
    pub(super) plan: Option<StagePlan>,
}

impl Need {
    pub(super) fn shape(&self) -> String {
        self.plan
            .as_ref()
            .map(|plan| plan.shape.clone())
            .unwrap_or_default()
    }

    /// Scratch of the exact rung that needs the least, or of any if there is no exact one.
    pub(super) fn least_scratch(&self) -> Bytes {
        let exact = self
            .rungs
            .iter()
            .filter(|r| !r.approximate)
            .map(|r| r.scratch)
            .min();
        exact
            .or_else(|| self.rungs.iter().map(|r| r.scratch).min())
            .unwrap_or(Bytes::ZERO)
    }

    pub(super) fn with_scratch(&self, scratch: Bytes) -> StageNeed {
        StageNeed {
            name: self.name.to_owned(),
            components: self.components.clone(),
            scratch,
        }
    }
}

/// Where a job is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Behind our own jobs.
    Queued,
    /// For late or foreign memory.
    Waiting,
    /// An order is with a worker.
    Running,
}

impl Phase {
    pub(super) fn name(self) -> &'static str {
        match self {
            Phase::Queued => "queued",
            Phase::Waiting => "waiting",
            Phase::Running => "running",
        }
    }
}

/// Patience for the step that comes next.
#[derive(Clone, Debug)]
pub(super) struct Patience {
    pub(super) wait: Wait,
    pub(super) next_tick: Instant,
    pub(super) shortage: Shortage,
}

/// A worker said that memory is short although its ledger had room: not asked again on the same snapshot for a while.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) snapshot: u64,
    pub(super) until: Instant,
    pub(super) shortage: Shortage,
}

pub(super) struct JobRecord {
    pub(super) id: JobId,
    /// Order of arrival.
    pub(super) arrival: u64,
    pub(super) options: JobOptions,
    pub(super) entry: Arc<Entry>,
    pub(super) work: JobWork,
    pub(super) models: OpenModels,
    pub(super) reductions: Reductions,
    /// Plans by compute dtype.
    pub(super) plans: BTreeMap<String, Vec<StagePlan>>,
    pub(super) text_key: Option<String>,
    pub(super) accepted: Instant,

    pub(super) steps: Vec<Step>,
    pub(super) cursor: usize,
    pub(super) text: Option<EncodedText>,
    pub(super) init: Option<HostTensor>,
    /// What a load makes to prove its model.
    pub(super) canary: Option<ImageRequest>,
    /// What a load replaces.
    pub(super) swap: Option<Box<Swap>>,
    /// Latents in the store by picture, each under a lease of this job.
    pub(super) latents: BTreeMap<u32, String>,
    /// Pictures whose latents the client knows of.
    pub(super) told: BTreeSet<u32>,
    /// A latent of a client that the job works on, under a lease.
    pub(super) input_latent: Option<String>,

    pub(super) phase: Phase,
    /// The card that it has just run on, and may go on with before anybody else.
    pub(super) keeps: Option<usize>,
    pub(super) last_card: Option<usize>,
    /// Whether a stage of it has run: such a job is before all that have not begun.
    pub(super) begun: bool,
    pub(super) overtaken: u32,
    pub(super) deaths: u32,
    pub(super) patience: Option<Patience>,
    pub(super) waiting_since: Option<Instant>,
    pub(super) waited: Duration,
    pub(super) refusals: BTreeMap<usize, Refusal>,
    /// Cards whose workers said never.
    pub(super) never_on: BTreeSet<usize>,
    /// Memory may be short: patience is over, or the stage exceeds the card.
    pub(super) low_memory: bool,
    /// What it ends with as soon as the worker lets go.
    pub(super) ending: Option<Error>,
    /// Nobody will ask for what it makes from now on.
    pub(super) releases_latents: bool,
    /// It ran out of memory in a step: what it ends with as soon as it is known what would fit instead.
    pub(super) out_of_memory: Option<Box<Shortfall>>,

    pub(super) report: JobReport,
    pub(super) step_done: u32,
    pub(super) steps_of_stage: u32,
    /// What the client was told last.
    pub(super) position: Option<u32>,
    pub(super) listeners: BTreeMap<u64, Arc<Mailbox>>,
    pub(super) detached: bool,
    /// For those who join later, if anybody can.
    pub(super) retained: Option<Vec<JobEvent>>,
}

impl JobRecord {
    pub(super) fn step(&self) -> Option<Step> {
        self.steps.get(self.cursor).copied()
    }

    pub(super) fn kind_name(&self) -> &'static str {
        match self.work {
            JobWork::Generate(_) => "GenerateImage",
            JobWork::Encode { .. } => "EncodeImage",
            JobWork::Decode { .. } => "DecodeLatent",
            JobWork::Load { .. } => "Load",
        }
    }

    pub(super) fn seed(&self) -> u64 {
        match &self.work {
            JobWork::Generate(generate) => generate.request.seed,
            JobWork::Encode { request } => request.seed,
            JobWork::Decode { .. } | JobWork::Load { .. } => 0,
        }
    }

    /// Whether the client asked for latents, rather than getting them because something failed.
    pub(super) fn keeps_latents(&self) -> bool {
        match &self.work {
            JobWork::Generate(generate) => generate.keep_latent || generate.latent_only,
            JobWork::Encode { .. } => true,
            JobWork::Decode { .. } | JobWork::Load { .. } => false,
        }
    }

    /// What the step at `index` needs on cards of this dtype, as the family says.
    pub(super) fn need(&self, index: usize, dtype: &str) -> Option<Need> {
        let step = self.steps.get(index)?;
        let kind = match step.kind {
            StepKind::Stage(kind) => kind,
            StepKind::Load => return self.load_need(dtype),
            StepKind::Restore => return self.restore_need(),
        };
        let plan = self
            .plans
            .get(dtype)?
            .iter()
            .find(|plan| plan.kind == kind)?
            .clone();
        let (components, rungs) = (plan.components.clone(), plan.rungs.clone());
        Some(Need {
            name: kind.name(),
            components,
            rungs,
            plan: Some(plan),
        })
    }

    fn load_need(&self, dtype: &str) -> Option<Need> {
        let JobWork::Load {
            components: names, ..
        } = &self.work
        else {
            return None;
        };
        let all = self.models.get(dtype)?.components.iter();
        let named = all.filter(|c| names.is_empty() || names.contains(&c.name));
        Some(Need {
            name: "load",
            components: named.cloned().collect(),
            rungs: Vec::new(),
            plan: None,
        })
    }

    fn restore_need(&self) -> Option<Need> {
        Some(Need {
            name: StepKind::Restore.name(),
            components: self.swap.as_ref()?.before().to_vec(),
            rungs: Vec::new(),
            plan: None,
        })
    }

    /// The request that a stage of this picture gets.
    pub(super) fn request(&self, picture: u32) -> ImageRequest {
        match &self.work {
            JobWork::Generate(generate) => {
                let mut request = generate.request.clone();
                request.seed = request.seed.wrapping_add(u64::from(picture));
                request
            }
            JobWork::Encode { request } => request.clone(),
            JobWork::Load { .. } if self.canary.is_some() => {
                self.canary.clone().unwrap_or_else(|| blank_request(0, 0))
            }
            JobWork::Decode { .. } | JobWork::Load { .. } => {
                let (width, height) = self.size();
                blank_request(width, height)
            }
        }
    }

    /// Pixels of what it makes.
    pub(super) fn size(&self) -> (u32, u32) {
        match &self.work {
            JobWork::Generate(generate) => (generate.request.width, generate.request.height),
            JobWork::Encode { request } => (request.width, request.height),
            JobWork::Decode { .. } => self.init.as_ref().map_or((0, 0), size_of_latent),
            JobWork::Load { .. } => {
                let canary = self.canary.as_ref();
                canary.map_or((0, 0), |request| (request.width, request.height))
            }
        }
    }

    /// What a stage gets beside the request; `latent` is that of its picture.
    pub(super) fn input(&self, step: Step, latent: Option<HostTensor>) -> StageInput {
        match step.kind {
            StepKind::Stage(StageKind::Denoise) => StageInput {
                text: self.text.clone(),
                latent: self.init.clone(),
            },
            StepKind::Stage(StageKind::Decode) => StageInput { text: None, latent },
            StepKind::Stage(StageKind::EncodeText | StageKind::EncodeImage)
            | StepKind::Load
            | StepKind::Restore => StageInput::default(),
        }
    }

    /// Tells everybody who listens, and remembers it for those who join.
    pub(super) fn emit(&mut self, now: Instant, kind: JobEventKind) {
        let event = JobEvent {
            at_ms: now.duration_since(self.accepted).as_millis() as u64,
            kind,
        };
        if let Some(retained) = &mut self.retained
            && !is_coalescible(&event.kind)
        {
            retained.push(event.clone());
        }
        let id = &self.id;
        self.listeners.retain(|listener, mailbox| {
            let reads = mailbox.push(event.clone());
            if !reads {
                tracing::warn!(job = %id, listener, "a listener does not read its pictures: it is dropped");
            }
            reads
        });
    }

    /// Another submission of the same job: it is detached if any of them is, and has until the latest deadline.
    pub(super) fn joined_by(&mut self, options: &JobOptions) {
        self.detached |= options.detach;
        let deadlines = self.options.deadline.zip(options.deadline);
        self.options.deadline = deadlines.map(|(earlier, other)| earlier.max(other));
    }

    /// When it must be done. A caller's deadline is no end to a job that goes on without its callers, nor to a swap that
    /// is past its turning point.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let decided = self.swap.as_ref().is_some_and(|swap| swap.is_decided());
        self.options.deadline.filter(|_| !self.detached && !decided)
    }

    /// Changes phase, and books the time that was spent waiting.
    pub(super) fn enter(&mut self, phase: Phase, now: Instant) {
        if phase != Phase::Waiting
            && let Some(since) = self.waiting_since.take()
        {
            self.waited += now.duration_since(since);
        }
        if phase == Phase::Waiting {
            self.waiting_since.get_or_insert(now);
        }
        if phase != self.phase {
            self.position = None;
        }
        self.phase = phase;
    }
}

/// What a piece of work brings along and keeps in memory.
pub(super) fn input_bytes(work: &JobWork) -> Bytes {
    let request = match work {
        JobWork::Generate(generate) => &generate.request,
        JobWork::Encode { request } => request,
        JobWork::Decode { .. } | JobWork::Load { .. } => return Bytes::ZERO,
    };
    let image = request.init_image.as_ref();
    image.map_or(Bytes::ZERO, |image| Bytes(image.rgb.len() as u64))
}

/// The steps of a piece of work, in the order that suits the policy: where one large component at a time is on the
/// card, all denoising is done before the first decode.
pub(super) fn steps_of(work: &JobWork, policy: Policy) -> Vec<Step> {
    let stage = |kind, picture| Step {
        kind: StepKind::Stage(kind),
        picture,
    };
    let generate = match work {
        JobWork::Generate(generate) => generate,
        JobWork::Encode { .. } => return vec![stage(StageKind::EncodeImage, 0)],
        JobWork::Decode { .. } => return vec![stage(StageKind::Decode, 0)],
        JobWork::Load { replace, prove, .. } => {
            let mut steps = vec![Step {
                kind: StepKind::Load,
                picture: 0,
            }];
            if *prove || replace.is_some() {
                let proof = [StageKind::EncodeText, StageKind::Denoise, StageKind::Decode];
                steps.extend(proof.map(|kind| stage(kind, 0)));
            }
            return steps;
        }
    };
    let mut steps = vec![stage(StageKind::EncodeText, 0)];
    let encodes = generate.request.init_image.is_some() && generate.init_latent.is_none();
    for picture in 0..generate.count.max(1) {
        if encodes {
            // Each draws its own start from what the encoder gives, as it would if it were asked for alone.
            steps.push(stage(StageKind::EncodeImage, picture));
        }
        steps.push(stage(StageKind::Denoise, picture));
        if !generate.latent_only {
            steps.push(stage(StageKind::Decode, picture));
        }
    }
    if policy == Policy::Exclusive {
        steps.sort_by_key(|step| step.kind == StepKind::Stage(StageKind::Decode)); // stable: pictures stay in order
    }
    steps
}

/// Pixels of the picture that a latent decodes to.
pub(super) fn size_of_latent(latent: &HostTensor) -> (u32, u32) {
    match latent.shape[..] {
        [_, _, height, width] => (8 * width as u32, 8 * height as u32),
        _ => (0, 0),
    }
}

fn blank_request(width: u32, height: u32) -> ImageRequest {
    ImageRequest {
        prompt: String::new(),
        width,
        height,
        steps: 1,
        guidance: 0.0,
        seed: 0,
        max_sequence_length: 0,
        init_image: None,
        strength: 1.0,
        preview: false,
    }
}
