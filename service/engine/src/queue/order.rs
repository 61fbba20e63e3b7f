//! The fair order: that in which jobs would start if all of them fitted.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::actor::Actor;
use super::record::{JobRecord, Phase};
use crate::job::{JobEventKind, JobId};

/// What a stage is taken to last as long as none like it has run.
const STAGE_MS: f64 = 1_000.0;

impl Actor {
    /// Jobs that do not run: first those that have begun, then the next job of the client with the least card time,
    /// each job counted as if it had run already. Within a client priority decides, then arrival.
    pub(super) fn fair_order(&self) -> Vec<JobId> {
        let idle = self.jobs.values().filter(|job| job.phase != Phase::Running);
        let (mut begun, mut fresh): (Vec<&JobRecord>, Vec<&JobRecord>) = idle.partition(|job| job.begun);
        begun.sort_unstable_by_key(|job| job.arrival);
        fresh.sort_unstable_by_key(|job| (Reverse(job.options.priority), job.arrival));
        let mut clients: BTreeMap<&str, (f64, VecDeque<&JobRecord>)> = BTreeMap::new();
        for job in fresh {
            let client = job.options.client.as_str();
            let queue = clients
                .entry(client)
                .or_insert_with(|| (self.virtual_ms(client), VecDeque::new()));
            queue.1.push_back(job);
        }
        let mut order: Vec<JobId> = begun.into_iter().map(|job| job.id.clone()).collect();
        while let Some(next) = clients
            .iter()
            .filter_map(|(client, (time, queue))| Some((*time, queue.front()?.arrival, *client)))
            .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
        {
            let Some((time, queue)) = clients.get_mut(next.2) else {
                break;
            };
            if let Some(job) = queue.pop_front() {
                *time += self.expected_ms(job).0 / job.options.priority.weight();
                order.push(job.id.clone());
            }
        }
        order
    }

    /// Card time of a client by its weights, with what runs counted in full.
    pub(super) fn virtual_ms(&self, client: &str) -> f64 {
        let running = self.cards.iter().filter_map(|card| card.in_flight.as_ref());
        let credit = running.filter_map(|running| {
            let job = self.jobs.get(running.job.as_ref()?)?;
            (job.options.client == client).then(|| running.expected_ms / job.options.priority.weight())
        });
        self.shares.virtual_ms(client) + credit.sum::<f64>()
    }

    /// Milliseconds that a job still takes, and whether that is known rather than guessed.
    pub(super) fn expected_ms(&self, job: &JobRecord) -> (f64, bool) {
        let (mut sum, mut known) = (0.0, true);
        let Some(dtype) = job.models.keys().next() else {
            return (STAGE_MS, false);
        };
        for index in job.cursor..job.steps.len() {
            let (ms, is_known) = self.expected_step_ms(job, index, dtype);
            sum += ms;
            known &= is_known;
        }
        (sum, known)
    }

    pub(super) fn expected_step_ms(&self, job: &JobRecord, index: usize, dtype: &str) -> (f64, bool) {
        if self.is_cached(job, index, dtype) {
            return (0.0, true);
        }
        let shape = job
            .need(index, dtype)
            .map(|need| (need.name.clone(), need.shape()));
        let learned =
            shape.and_then(|(name, shape)| self.learned.stage_ms(&(job.entry.key.clone(), name, shape)));
        (learned.unwrap_or(STAGE_MS), learned.is_some())
    }

    /// Predicted seconds until each card has done all of the job that it is at.
    pub(super) fn seconds_ahead(&self, now: Instant) -> Vec<f64> {
        let seconds = self.cards.iter().map(|card| {
            let job = card
                .in_flight
                .as_ref()
                .and_then(|running| self.jobs.get(running.job.as_ref()?));
            let later_ms = job.map_or(0.0, |job| {
                let dtype = &card.description.compute_dtype;
                let later = job.cursor + 1..job.steps.len();
                later
                    .map(|index| self.expected_step_ms(job, index, dtype).0)
                    .sum()
            });
            card.busy_seconds(now) + later_ms / 1000.0
        });
        seconds.collect()
    }

    /// Tells queued jobs where they are, when that has changed.
    pub(super) fn tell_positions(&mut self, order: &[JobId], now: Instant) {
        let working = self.cards.iter().filter(|card| card.is_ready()).count().max(1) as f64;
        let mut ahead_ms: f64 = self
            .seconds_ahead(now)
            .iter()
            .map(|seconds| seconds * 1000.0)
            .sum();
        let runs = |job: &&JobRecord| job.phase == Phase::Running;
        let mut known = self.cards.iter().all(|card| card.is_ready())
            && self.jobs.values().filter(runs).all(|job| self.expected_ms(job).1);
        let mut position = 0;
        for id in order {
            let Some(job) = self.jobs.get(id).filter(|job| job.phase != Phase::Running) else {
                continue;
            };
            let (ms, is_known) = self.expected_ms(job);
            let is_told = job.phase == Phase::Queued && !job.is_near_refusal();
            let tell = is_told && job.position != Some(position);
            if tell && let Some(job) = self.jobs.get_mut(id) {
                job.position = Some(position);
                let estimate = known.then(|| Duration::from_secs_f64(ahead_ms / 1000.0 / working));
                job.emit(now, JobEventKind::Queued { position, estimate });
            }
            ahead_ms += ms;
            known &= is_known;
            position += 1;
        }
    }
}
