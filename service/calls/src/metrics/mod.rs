//! What the service counts of itself, for Prometheus. Counters are atomic, and the state is read from the reports that the queue
//! publishes: a scrape asks the queue nothing.

mod state;

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use engine::job::{JobEventKind, JobReport, StageReport};
use engine::queue::{Happening, ObservedJob, Observer};
use engine::{CancelledBy, Error};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry, Unit};
use residency::Bytes;

use crate::{ServiceStatus, told};

/// Prefix of all names.
const PREFIX: &str = "moored";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfCard {
    card: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfJob {
    call: &'static str,
    model: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfEnd {
    call: &'static str,
    model: String,
    /// `done`, `failed`, `cancelled`.
    end: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfCall {
    call: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfModel {
    model: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfReason {
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfCause {
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfStage {
    stage: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfStageCached {
    stage: String,
    cached: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfPhase {
    stage: String,
    /// `run`, `move`, `wait`.
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfLoss {
    card: String,
    /// `lost`, `replaced`.
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfMethod {
    protocol: &'static str,
    method: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfRefusal {
    protocol: &'static str,
    method: &'static str,
    reason: String,
}

/// A histogram of durations from 10 ms to three quarters of an hour.
#[derive(Clone)]
struct Durations;

impl MetricConstructor<Histogram> for Durations {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(0.01, 2.5, 14))
    }
}

/// A histogram of quotients around 1.
#[derive(Clone)]
struct Ratios;

impl MetricConstructor<Histogram> for Ratios {
    fn new_metric(&self) -> Histogram {
        Histogram::new([0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0])
    }
}

type Seconds = Counter<f64, AtomicU64>;

/// Counters since the service started.
pub struct Metrics {
    registry: Registry,
    accepted: Family<OfJob, Counter>,
    ended: Family<OfEnd, Counter>,
    failures: Family<OfReason, Counter>,
    durations: Family<OfCall, Histogram, Durations>,
    stages: Family<OfStageCached, Counter>,
    phases: Family<OfPhase, Histogram, Durations>,
    scratch_ratio: Family<OfStage, Histogram, Ratios>,
    steps: Family<OfModel, Counter>,
    waits: Family<OfCause, Counter>,
    wait_seconds: Family<OfCause, Seconds>,
    retries: Family<OfReason, Counter>,
    evictions: Family<OfCard, Counter>,
    evicted_bytes: Family<OfCard, Counter>,
    loads: Family<OfCard, Counter>,
    loaded_bytes: Family<OfCard, Counter>,
    load_seconds: Family<OfCard, Seconds>,
    unloads: Family<OfCard, Counter>,
    unloaded_bytes: Family<OfCard, Counter>,
    left_bytes: Family<OfCard, Counter>,
    losses: Family<OfLoss, Counter>,
    calls: Family<OfMethod, Counter>,
    refused: Family<OfRefusal, Counter>,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Registers metrics that share their values with what is returned.
struct Names(Registry);

impl Names {
    fn one<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(name, help, metric.clone());
        metric
    }

    fn of_unit<M: Metric + Clone>(&mut self, name: &str, help: &str, unit: Unit, metric: M) -> M {
        self.0.register_with_unit(name, help, unit, metric.clone());
        metric
    }
}

impl Metrics {
    /// All counters at 0.
    pub fn new() -> Metrics {
        let mut names = Names(Registry::with_prefix(PREFIX));
        let (bytes, seconds) = (|| Unit::Bytes, || Unit::Seconds);
        let phases = Family::new_with_constructor(Durations);
        let durations = Family::new_with_constructor(Durations);
        let ratios = Family::new_with_constructor(Ratios);
        Metrics {
            accepted: names.one("jobs_accepted", "Jobs that were accepted", Family::default()),
            ended: names.one("jobs_ended", "Jobs that have ended, by how", Family::default()),
            failures: names.one("job_failures", "Jobs that failed, by reason", Family::default()),
            durations: names.of_unit(
                "job_duration",
                "Time from the acceptance of a job to its end, of those that were done",
                seconds(),
                durations,
            ),
            stages: names.one("stages", "Stages that were done, or taken from a cache", Family::default()),
            phases: names.of_unit(
                "stage_duration",
                "Time of a stage by phase: run, move (loads and evictions before it), wait (for memory before it)",
                seconds(),
                phases,
            ),
            scratch_ratio: names.one(
                "stage_scratch_ratio",
                "The peak of a stage's activations, divided by what was planned for them",
                ratios,
            ),
            steps: names.one("steps", "Denoising steps that were done", Family::default()),
            waits: names.one("waits", "Waits for memory that have ended, by cause", Family::default()),
            wait_seconds: names.of_unit(
                "wait_duration",
                "Time that jobs waited for memory, by cause",
                seconds(),
                Family::default(),
            ),
            retries: names.one("retries", "Stages and jobs that began again, by reason", Family::default()),
            evictions: names.one(
                "evictions",
                "Components that were evicted for a job",
                Family::default(),
            ),
            evicted_bytes: names.of_unit(
                "evicted",
                "Bytes of components that were evicted for a job",
                bytes(),
                Family::default(),
            ),
            loads: names.one("loads", "Components that were loaded", Family::default()),
            loaded_bytes: names.of_unit(
                "loaded",
                "Bytes of components that were loaded, of those that are on the card",
                bytes(),
                Family::default(),
            ),
            load_seconds: names.of_unit(
                "load_duration",
                "Time in which components were loaded",
                seconds(),
                Family::default(),
            ),
            unloads: names.one(
                "unloads",
                "Components that were unloaded on request, or because nobody used them",
                Family::default(),
            ),
            unloaded_bytes: names.of_unit(
                "unloaded",
                "Bytes that were booked for components that were unloaded",
                bytes(),
                Family::default(),
            ),
            left_bytes: names.of_unit(
                "unload_left",
                "Bytes that the driver did not show as free after an unload",
                bytes(),
                Family::default(),
            ),
            losses: names.one(
                "worker_losses",
                "Workers that died, and workers that were replaced on request",
                Family::default(),
            ),
            calls: names.one("calls", "Calls that were answered", Family::default()),
            refused: names.one("calls_refused", "Calls that were refused, by reason", Family::default()),
            registry: names.0,
        }
    }

    /// Counts a call that was answered. `refused`: the reason, if it was refused.
    pub fn called(&self, protocol: &'static str, method: &'static str, refused: Option<String>) {
        let of = OfMethod { protocol, method };
        self.calls.get_or_create(&of).inc();
        if let Some(reason) = refused {
            let of = OfRefusal {
                protocol,
                method,
                reason,
            };
            self.refused.get_or_create(&of).inc();
        }
    }

    /// All counters, and the state, in the text format of OpenMetrics.
    ///
    /// # Errors
    /// When a value cannot be written as text.
    pub fn text(&self, status: &ServiceStatus) -> Result<String, Error> {
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)
            .and_then(|()| encode_registry(&mut text, &state::registry_of(status)))
            .and_then(|()| encode_eof(&mut text))
            .map_err(|problem| Error::Internal(problem.to_string()))?;
        Ok(text)
    }

    fn event(&self, job: ObservedJob<'_>, event: &JobEventKind) {
        match event {
            JobEventKind::Accepted { joined: false } => {
                let of = OfJob {
                    call: job.call.as_str(),
                    model: job.model.to_owned(),
                };
                self.accepted.get_or_create(&of).inc();
            }
            JobEventKind::Step { .. } => {
                let model = job.model.to_owned();
                self.steps.get_or_create(&OfModel { model }).inc();
            }
            JobEventKind::Evicting { component, card } => {
                let of = OfCard { card: card.clone() };
                self.evictions.get_or_create(&of).inc();
                self.evicted_bytes.get_or_create(&of).inc_by(component.bytes.0);
            }
            JobEventKind::Retrying { reason, .. } => {
                let reason = reason.clone();
                self.retries.get_or_create(&OfReason { reason }).inc();
            }
            JobEventKind::Accepted { joined: true }
            | JobEventKind::Queued { .. }
            | JobEventKind::Waiting { .. }
            | JobEventKind::Loading { .. }
            | JobEventKind::Stage { .. }
            | JobEventKind::Preview { .. }
            | JobEventKind::Piece { .. }
            | JobEventKind::Latent { .. }
            | JobEventKind::Done(_)
            | JobEventKind::Failed(_) => {}
        }
    }

    fn stage(&self, report: &StageReport) {
        let stage = || report.name.to_string();
        let cached = match report.cached {
            true => "true",
            false => "false",
        };
        let of = OfStageCached {
            stage: stage(),
            cached,
        };
        self.stages.get_or_create(&of).inc();
        if report.cached {
            return;
        }
        for (phase, lasted) in [("run", report.run), ("move", report.moves), ("wait", report.wait)] {
            let of = OfPhase {
                stage: stage(),
                phase,
            };
            self.phases.get_or_create(&of).observe(lasted.as_secs_f64());
        }
        if report.predicted_scratch > Bytes::ZERO {
            let ratio = report.peak_scratch.0 as f64 / report.predicted_scratch.0 as f64;
            let of = OfStage { stage: stage() };
            self.scratch_ratio.get_or_create(&of).observe(ratio);
        }
    }

    fn ended(&self, job: ObservedJob<'_>, report: &JobReport, result: Result<(), &Error>) {
        let end = match result {
            Ok(()) => "done",
            Err(Error::Cancelled(_)) => "cancelled",
            Err(_) => "failed",
        };
        let of = OfEnd {
            call: job.call.as_str(),
            model: job.model.to_owned(),
            end,
        };
        self.ended.get_or_create(&of).inc();
        match result {
            Ok(()) => {
                let call = job.call.as_str();
                let durations = self.durations.get_or_create(&OfCall { call });
                durations.observe(report.total.as_secs_f64());
            }
            Err(Error::Cancelled(
                CancelledBy::Call { .. }
                | CancelledBy::Unload { .. }
                | CancelledBy::Left
                | CancelledBy::Unread
                | CancelledBy::Withdrawn,
            )) => {}
            Err(error) => {
                let reason = told(error).reason.to_owned();
                self.failures.get_or_create(&OfReason { reason }).inc();
            }
        }
    }

    fn loaded(&self, card: &str, bytes: Bytes, lasted: Duration) {
        let of = OfCard {
            card: card.to_owned(),
        };
        self.loads.get_or_create(&of).inc();
        self.loaded_bytes.get_or_create(&of).inc_by(bytes.0);
        self.load_seconds.get_or_create(&of).inc_by(lasted.as_secs_f64());
    }
}

impl Observer for Metrics {
    fn happened(&self, happening: &Happening<'_>) {
        match happening {
            Happening::Event { job, event } => self.event(*job, event),
            Happening::Stage { report, .. } => self.stage(report),
            Happening::Ended { job, report, result } => self.ended(*job, report, *result),
            Happening::Waited { cause, lasted, .. } => {
                let of = OfCause { cause };
                self.waits.get_or_create(&of).inc();
                let seconds = self.wait_seconds.get_or_create(&of);
                seconds.inc_by(lasted.as_secs_f64());
            }
            Happening::Loaded { card, bytes, lasted } => self.loaded(card, *bytes, *lasted),
            Happening::Unloaded { card, freed } => {
                let of = OfCard {
                    card: (*card).to_owned(),
                };
                for (_, unloaded) in *freed {
                    self.unloads.get_or_create(&of).inc();
                    self.unloaded_bytes.get_or_create(&of).inc_by(unloaded.booked.0);
                    let left = unloaded.booked - unloaded.freed.min(unloaded.booked);
                    self.left_bytes.get_or_create(&of).inc_by(left.0);
                }
            }
            Happening::WorkerLost { card, was_asked_for } => {
                let of = OfLoss {
                    card: (*card).to_owned(),
                    cause: if *was_asked_for { "replaced" } else { "lost" },
                };
                self.losses.get_or_create(&of).inc();
            }
        }
    }
}

#[cfg(test)]
mod tests;
