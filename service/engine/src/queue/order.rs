//! The fair order, in which jobs would start if all of them fitted.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::learned::StageKey;
use super::record::{JobRecord, State};
use super::view::View;
use crate::job::{JobId, JobOptions};
use crate::need::passes_of;

/// Assumed duration of a stage until one like it has run, in milliseconds.
const STAGE_MS: f64 = 1_000.0;

/// A job in line, and the virtual time that it will be charged.
struct Waiting<'a> {
    job: &'a JobRecord,
    virtual_ms: f64,
}

/// One line of several, each with the virtual time of its owner: the next is the first of the owner with the least, then the
/// earliest.
fn merged(mut lines: Vec<(f64, VecDeque<Waiting<'_>>)>) -> VecDeque<Waiting<'_>> {
    let mut all = VecDeque::new();
    while let Some((virtual_ms, line)) = lines
        .iter_mut()
        .filter_map(|(virtual_ms, line)| Some((*virtual_ms, line.front()?.job.arrival, (virtual_ms, line))))
        .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
        .map(|(_, _, line)| line)
    {
        if let Some(waiting) = line.pop_front() {
            *virtual_ms += waiting.virtual_ms;
            all.push_back(waiting);
        }
    }
    all
}

impl View<'_> {
    /// Jobs that do not run: first those that have begun, then the next job of the account with the least card time, and within it of
    /// the client with the least, each job counted as if it had run already. Within a client priority decides, then arrival.
    pub(super) fn fair_order(&self) -> Vec<JobId> {
        let (mut begun, mut fresh): (Vec<&JobRecord>, Vec<&JobRecord>) =
            self.idle_jobs().partition(|job| job.begun);
        begun.sort_unstable_by_key(|job| job.arrival);
        fresh.sort_unstable_by_key(|job| (Reverse(job.options.priority), job.arrival));
        let mut accounts: BTreeMap<&str, BTreeMap<&str, VecDeque<Waiting<'_>>>> = BTreeMap::new();
        for job in fresh {
            let JobOptions { account, client, .. } = &job.options;
            let clients = accounts.entry(account).or_default();
            clients.entry(client).or_default().push_back(Waiting {
                job,
                virtual_ms: self.expected_card_ms(job) / job.options.priority.weight(),
            });
        }
        let accounts = accounts.into_iter().map(|(account, clients)| {
            let clients = clients.into_iter();
            let clients = clients.map(|(client, jobs)| (self.client_ms(account, client), jobs));
            (self.account_ms(account), merged(clients.collect()))
        });
        let fresh = merged(accounts.collect());
        let order = begun
            .into_iter()
            .chain(fresh.into_iter().map(|waiting| waiting.job));
        self.with_joiners_first(order.map(|job| job.id.clone()).collect())
    }

    /// By how much more card time a job's owners had than another's: its account, or within one account its client.
    pub(super) fn lead_ms(&self, job: &JobRecord, over: &JobRecord) -> f64 {
        let (own, other) = (&job.options, &over.options);
        match own.account == other.account {
            true => self.client_ms(&own.account, &own.client) - self.client_ms(&other.account, &other.client),
            false => self.account_ms(&own.account) - self.account_ms(&other.account),
        }
    }

    /// Card time of an account by the weights of its jobs, with what runs counted in full.
    fn account_ms(&self, account: &str) -> f64 {
        self.shares.of_account(account) + self.running_ms(|options| options.account == account)
    }

    /// The same of a client among those of its account.
    fn client_ms(&self, account: &str, client: &str) -> f64 {
        let are_meant = |options: &JobOptions| options.account == account && options.client == client;
        self.shares.of_client(account, client) + self.running_ms(are_meant)
    }

    fn running_ms(&self, are_meant: impl Fn(&JobOptions) -> bool) -> f64 {
        let running = self.cards.iter().flat_map(|card| card.orders());
        let credit = running.filter_map(|running| {
            let job = self.jobs.get(running.job.as_ref()?)?;
            are_meant(&job.options).then(|| running.expected_ms / job.options.priority.weight())
        });
        credit.sum()
    }

    /// Milliseconds that a job still takes, and whether that is known rather than guessed.
    pub(super) fn expected_ms(&self, job: &JobRecord) -> (f64, bool) {
        let (mut sum, mut known) = (0.0, true);
        for index in job.cursor..job.steps.len() {
            let (ms, is_known) = self.expected_step_ms(job, index, None);
            sum += ms;
            known &= is_known;
        }
        (sum, known)
    }

    /// Milliseconds of card time that a job still takes: those of two cards where it runs on two.
    fn expected_card_ms(&self, job: &JobRecord) -> f64 {
        let steps = job.cursor..job.steps.len();
        let of_step = |index: usize| {
            let cards = if job.is_on_two_cards(index) { 2.0 } else { 1.0 };
            self.expected_step_ms(job, index, None).0 * cards
        };
        steps.map(of_step).sum()
    }

    /// Milliseconds that a step takes on a card, or (`None`) on the fastest that ran one like it, and whether one like it ran. Where none ran
    /// on the card, what another took counts by the speeds of both, as a CPU is not as fast as a GPU; where those are not
    /// known, or none ran at all, no less than its operations take.
    pub(super) fn expected_step_ms(&self, job: &JobRecord, index: usize, card: Option<usize>) -> (f64, bool) {
        let dtype = card.map(|card| &self.cards[card].description.compute_dtype);
        let Some(dtype) = dtype.or_else(|| job.models.keys().next()) else {
            return (STAGE_MS, false);
        };
        let Some(&step) = job.steps.get(index).filter(|step| !step.is_unload()) else {
            return (0.0, true);
        };
        if self.is_cached(job, index, dtype) {
            return (0.0, true);
        }
        let stage = job.stage(step);
        let previewed = stage.filter(|stage| stage.preview.is_some());
        let previewed = previewed.map(|stage| stage.clone().with_previews().shape);
        let shape = stage.map(|stage| stage.shape.clone()).unwrap_or_default();
        let keys = previewed.into_iter().chain([shape]);
        let keys: Vec<StageKey> = keys
            .map(|shape| (job.entry.key.clone(), job.name_of(step), shape))
            .collect();
        let here = card.and_then(|card| keys.iter().find_map(|key| self.learned.stage_ms_on(key, card)));
        if let Some(ms) = here {
            return (ms, true);
        }
        let computing_ms = |(card, stage)| {
            let ms = 1000.0 * self.computing_seconds(stage, card)?;
            Some(ms * f64::from(passes_of(stage)))
        };
        let computing_ms = || card.zip(stage).and_then(computing_ms).unwrap_or(0.0);
        if let Some((there, ms)) = keys.iter().find_map(|key| self.learned.fastest(key)) {
            let Some(here) = card else {
                return (ms, true);
            };
            return match [there, here].map(|card| self.cards[card].speeds.flops) {
                [Some(there), Some(here)] if here > 0 => (ms * there as f64 / here as f64, true),
                // The other one has not started since what was learned was kept.
                _ => (ms.max(computing_ms()), false),
            };
        }
        (STAGE_MS.max(computing_ms()), false)
    }

    /// Predicted seconds until each card has finished its current job.
    pub(super) fn seconds_ahead(&self) -> Vec<f64> {
        let seconds = self.cards.iter().enumerate().map(|(here, card)| {
            let job = card.job().and_then(|id| self.jobs.get(id));
            let later_ms = job.map_or(0.0, |job| {
                let later = job.cursor + 1..job.steps.len();
                later
                    .map(|index| self.expected_step_ms(job, index, Some(here)).0)
                    .sum()
            });
            card.busy_seconds(self.now) + later_ms / 1000.0
        });
        seconds.collect()
    }

    /// The positions that have changed in this order, each with the time until the job starts where that is known.
    pub(super) fn changed_positions(&self, order: &[JobId]) -> Vec<(JobId, u32, Option<Duration>)> {
        let working = self.cards.iter().filter(|card| card.is_ready()).count().max(1) as f64;
        let mut ahead_ms = self.seconds_ahead().iter().sum::<f64>() * 1000.0;
        let mut running = self.jobs.values().filter(|job| job.is_running());
        let mut known =
            self.cards.iter().all(|card| card.is_ready()) && running.all(|job| self.expected_ms(job).1);
        let idle = order
            .iter()
            .filter_map(|id| self.jobs.get(id).filter(|job| !job.is_running()));
        let mut changed = Vec::new();
        for (position, job) in (0..).zip(idle) {
            if View::is_in_line(job)
                && !matches!(job.state, State::Queued { position: Some(told), .. } if told == position)
            {
                let estimate = known.then(|| Duration::from_secs_f64(ahead_ms / 1000.0 / working));
                changed.push((job.id.clone(), position, estimate));
            }
            let (ms, is_known) = self.expected_ms(job);
            ahead_ms += ms;
            known &= is_known;
        }
        changed
    }
}
