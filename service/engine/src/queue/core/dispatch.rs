//! Carries decisions out: orders are sent, jobs queue up, wait, or are refused.

use std::time::Duration;

use model::Values;
use residency::{Bytes, WaitCause};
use tokio::time::Instant;

use super::{Core, Effect, TICK};
use crate::error::Error;
use crate::job::{JobEventKind, JobId, StageReport};
use crate::library::Entry;
use crate::messages::{ModelLocation, Order, Sharing, StageWork, Work};
use crate::need::{Need, ids_of};
use crate::queue::cards::InFlight;
use crate::queue::decide::{Decision, Pass};
use crate::queue::placing::Companion;
use crate::queue::record::{JobRecord, Patience, State};
use crate::queue::reductions::{Reduction, Reductions};
use crate::queue::steps::{JobStep, JobStepKind, Model};

impl Core {
    /// Starts all jobs that can start, and reports to the others why they cannot.
    pub(super) fn dispatch(&mut self, now: Instant) {
        self.restore_pinned(now);
        self.go_on(now);
        let mut pass = Pass::new(&self.view(now));
        while let Some(decision) = pass.next(&self.view(now)) {
            self.carry_out(decision, now);
        }
        self.send_ahead(now);
        for (id, position, estimate) in self.view(now).changed_positions(pass.order()) {
            if let Some(job) = self.jobs.get_mut(&id)
                && let State::Queued { position: told, .. } = &mut job.state
            {
                *told = Some(position);
                job.emit(now, JobEventKind::Queued { position, estimate });
            }
        }
    }

    fn carry_out(&mut self, decision: Decision, now: Instant) {
        match decision {
            Decision::Start {
                job,
                card,
                low_memory,
                companion,
                overtaken,
            } => {
                for id in overtaken {
                    if let Some(job) = self.jobs.get_mut(&id) {
                        job.overtaken += 1;
                    }
                }
                self.start(&job, (card, low_memory), companion, now);
            }
            Decision::Queue { job } => self.queue_up(&job, now),
            Decision::Wait { job, patience } => self.wait(&job, patience, now),
            Decision::RunShort { job: id, patience } => {
                if let Some(job) = self.jobs.get_mut(&id) {
                    tracing::warn!(job = %id, "it runs although memory is short, as it allows");
                    job.attempt.patience = Some(patience);
                    job.attempt.low_memory = true;
                    job.queue_up(now);
                    self.replan = true;
                }
            }
            Decision::FindOffers { job, patience } => {
                self.open_reductions(&job);
                match patience {
                    Some(patience) => self.wait_for_offers(&job, patience, now),
                    None => self.queue_up(&job, now),
                }
            }
            Decision::Refuse { job, error } => self.fail(&job, error, now),
        }
    }

    /// Reloads pinned components on a fresh worker before anything else runs on it.
    fn restore_pinned(&mut self, now: Instant) {
        for index in 0..self.cards.len() {
            if !self.cards[index].is_free() {
                continue;
            }
            let Some((entry, components)) = self.cards[index].restore.pop_front() else {
                continue;
            };
            let need = Need {
                name: "load".into(),
                components: components.clone(),
                plan: None,
                headroom: Bytes::ZERO,
                later: Vec::new(),
                model: ids_of(&components),
            };
            let order = Order {
                ticket: self.ticket(),
                job: format!("restore {}", entry.key),
                model: self.location(&entry, index),
                work: Work::Load(components),
                policy: self.settings.policy.unwrap_or_default(),
                allow_low_memory: false,
                headroom: Bytes::ZERO,
                components: need.model.clone(),
                sharing: Vec::new(),
                together: None,
                is_ahead: false,
            };
            let in_flight = InFlight::new(order.ticket, None, &entry.key, need, 1000.0, now);
            self.cards[index].order(order, in_flight);
        }
    }

    /// Sends workers that are about to have nothing to do the order that they begin next.
    fn send_ahead(&mut self, now: Instant) {
        for index in 0..self.cards.len() {
            if let Some((id, pass)) = self.view(now).next_ahead(index) {
                let starts = self.yielding(id, pass);
                self.start(&starts, (index, false), None, now);
            }
        }
    }

    /// Which of two jobs starts: the one whose pass goes before the first, if there is one. The first yields to passes once.
    fn yielding(&mut self, id: JobId, pass: Option<JobId>) -> JobId {
        if pass.is_some()
            && let Some(job) = self.jobs.get_mut(&id)
        {
            job.attempt.yielded = true;
        }
        pass.unwrap_or(id)
    }

    /// A job that runs keeps its card for its next stage, unless that has to wait. One whose next stage takes a second card gets both by
    /// the fair order, in which it is before all that have not begun; there it holds a free one too.
    fn go_on(&mut self, now: Instant) {
        for index in 0..self.cards.len() {
            // There are several if they have shared a pass: the earliest is the first.
            let keepers = self
                .jobs
                .values_mut()
                .filter(|job| job.kept_card() == Some(index));
            let Some(job) = keepers.min_by_key(|job| job.arrival) else {
                continue;
            };
            job.give_up_card();
            let id = job.id.clone();
            let view = self.view(now);
            let starts = view.jobs.get(&id).filter(|_| view.cards[index].is_free());
            let starts = starts.filter(|job| !view.is_next_on_two_cards(job, index));
            if let Some(low_memory) = starts.and_then(|job| view.starts_on(job, index)) {
                match view.pass_before(&id, index) {
                    Some(pass) => {
                        let pass = self.yielding(id, Some(pass));
                        self.start(&pass, (index, false), None, now);
                    }
                    None => self.start(&id, (index, low_memory), None, now),
                }
            }
        }
    }

    fn queue_up(&mut self, id: &JobId, now: Instant) {
        let time = self.view(now).time;
        if let Some(job) = self.jobs.get_mut(id) {
            if let Some(patience) = &mut job.attempt.patience {
                patience.wait.update(time, WaitCause::Leases); // our own jobs cost no patience
            }
            job.queue_up(now);
        }
    }

    /// The job waits for memory of other programs; its listeners get an event about that at each tick.
    fn wait(&mut self, id: &JobId, mut patience: Patience, now: Instant) {
        let left = Duration::from_millis(patience.wait.left(self.view(now).time));
        let Some(job) = self.jobs.get_mut(id) else { return };
        let is_new = !matches!(job.state, State::Waiting { .. });
        if !is_new && now < patience.next_tick {
            job.attempt.patience = Some(patience);
            return;
        }
        let over = now + left;
        let at_the_end = (over > now).then_some(over); // a worker may answer `Wait` even to a job that accepts low memory
        patience.next_tick = at_the_end.map_or(now + TICK, |over| over.min(now + TICK));
        let shortage = patience.shortage.clone();
        let event = JobEventKind::Waiting {
            stage: job.stage_name(),
            needed: shortage.needed,
            free: shortage.usable,
            holders: shortage.holders,
            patience_left: left,
            cause: shortage.cause.as_str(),
        };
        job.attempt.patience = Some(patience);
        if is_new {
            job.enter(State::Waiting { since: now }, now);
        }
        job.emit(now, event);
    }

    /// A job whose patience is over waits on until the alternatives for its refusal are known.
    fn wait_for_offers(&mut self, id: &JobId, mut patience: Patience, now: Instant) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        patience.next_tick = now + TICK;
        job.attempt.patience = Some(patience);
        if !matches!(job.state, State::Waiting { .. }) {
            job.enter(State::Waiting { since: now }, now);
        }
    }

    /// Has a job's model opened in smaller formats, once. The job is decided again when that is done.
    fn open_reductions(&mut self, id: &JobId) {
        let cards = self.cards.iter().map(|card| card.description.clone());
        let Some(job) = self.jobs.get_mut(id) else { return };
        if !job.is_near_refusal() {
            job.reductions = Reductions::Opening;
            self.effects.push(Effect::OpenReductions {
                job: id.clone(),
                entry: job.entry.clone(),
                models: job.models.clone(),
                cards: cards.collect(),
            });
        }
    }

    pub(super) fn reductions_opened(&mut self, id: &JobId, mut reductions: Vec<Reduction>) {
        for reduction in &mut reductions {
            // With their current identities, like the job's own components.
            reduction.models = self.refreshed(&reduction.entry, &reduction.models);
        }
        if let Some(job) = self.jobs.get_mut(id) {
            job.reductions = Reductions::Known(reductions);
        }
        self.replan = true;
    }

    /// Sends a job's next step to a card, and its second part to another where two cards run it together.
    fn start(
        &mut self,
        id: &JobId,
        (index, low_memory): (usize, bool),
        companion: Option<Companion>,
        now: Instant,
    ) {
        self.prepare_swap_step(id, index, now);
        self.take_cached_values(id, index, now);
        let Some(job) = self.jobs.get(id) else { return };
        if job.step().is_some_and(|step| step.is_unload()) {
            return self.advance(id, now);
        }
        if job.is_on_two_cards(job.cursor) != companion.is_some() {
            self.replan = true; // decided again in the next turn, for the step that it is
            return;
        }
        let view = self.view(now);
        let shared = view.shared_with(job, index).filter(|_| !low_memory);
        let (sharing, need) = match shared {
            Some((sharing, need)) => (sharing, Some(need)),
            None => (Vec::new(), view.need_on(job, job.cursor, index)),
        };
        let order = match (job.step(), need) {
            (Some(step), Some(need)) => self.work_of(job, step, &need).map(|work| (step, need, work)),
            _ => Err(Error::Internal("a job was started that has nothing to do".into())),
        };
        let second = match companion {
            Some(companion) => self.second_part(job, companion, now).map(Some),
            None => Ok(None),
        };
        let ((step, need, work), second) = match order.and_then(|order| Ok((order, second?))) {
            Ok(orders) => orders,
            Err(error) => return self.fail(id, error, now),
        };
        let entry = match (step.kind, &job.swap) {
            (JobStepKind::Load(Model::Replaced), Some(swap)) => &swap.old,
            _ => &job.entry,
        };
        let mut model = self.location(entry, index);
        let (policy, headroom) = (view.policy(job, index), need.headroom);
        let expected_ms = view.expected_step_ms(job, job.cursor, Some(index)).0;
        let ticket = self.ticket();
        let sharing = self.share(sharing, index, now);
        for job in sharing.iter().filter_map(|(id, _)| self.jobs.get(id)) {
            model = model.with_adapters_of(self.location(&job.entry, index));
        }
        let tickets = sharing.iter().map(|(job, sharing)| (sharing.ticket, job.clone()));
        let tickets = tickets.collect();
        let order = Order {
            ticket,
            job: id.to_string(),
            model,
            work,
            policy,
            allow_low_memory: low_memory,
            headroom,
            components: need.model.clone(),
            sharing: sharing.into_iter().map(|(_, sharing)| sharing).collect(),
            together: None,
            is_ahead: false,
        };
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.run_on(index, now);
        let in_flight = InFlight::new(ticket, Some(id.clone()), &job.entry.key, need, expected_ms, now);
        match second {
            Some(second) => self.start_both(index, (order, in_flight), second),
            None => self.cards[index].order(order, in_flight.shared_with(tickets)),
        }
    }

    /// The next stages of these jobs, as they share the passes of an order to a card.
    fn share(&mut self, jobs: Vec<JobId>, index: usize, now: Instant) -> Vec<(JobId, Sharing)> {
        let mut shared = Vec::with_capacity(jobs.len());
        for id in jobs {
            self.take_cached_values(&id, index, now);
            let view = self.view(now);
            let stage = self.jobs.get(&id).and_then(|job| {
                let need = view.need_on(job, job.cursor, index)?;
                Some(self.work_of(job, job.step()?, &need))
            });
            let work = match stage {
                Some(Ok(Work::Stage(work))) => *work,
                Some(Err(error)) => {
                    self.fail(&id, error, now);
                    continue;
                }
                Some(Ok(Work::Load(_))) | None => continue,
            };
            let ticket = self.ticket();
            if let Some(job) = self.jobs.get_mut(&id) {
                job.run_on(index, now);
                let job = id.to_string();
                shared.push((id, Sharing { ticket, job, work }));
            }
        }
        shared
    }

    pub(super) fn location(&self, entry: &Entry, card: usize) -> ModelLocation {
        self.library
            .location(entry, &self.cards[card].description.compute_dtype)
    }

    /// Stages whose values are cached are not run, and need no component.
    fn take_cached_values(&mut self, id: &JobId, index: usize, now: Instant) {
        let dtype = self.cards[index].description.compute_dtype.clone();
        let Some(next) = self.jobs.get(id).map(|job| self.view(now).next_step(job, &dtype)) else {
            return;
        };
        while self.jobs.get(id).is_some_and(|job| job.cursor < next) {
            if !self.take_cached_step(id, index, now) {
                return;
            }
        }
    }

    /// Whether the values of a job's next step were taken from the cache, so that the job goes on to the step after it.
    fn take_cached_step(&mut self, id: &JobId, index: usize, now: Instant) -> bool {
        let card = &self.cards[index].description;
        let Some(job) = self.jobs.get(id) else {
            return false;
        };
        let Some(
            step @ JobStep {
                kind: JobStepKind::Stage(stage),
                ..
            },
        ) = job.step()
        else {
            return false;
        };
        let cached = job
            .memo_key(stage, &card.compute_dtype)
            .and_then(|key| self.memos.get(&key));
        let (Some(values), Some(job)) = (cached, self.jobs.get_mut(id)) else {
            return false;
        };
        job.values.extend(values);
        let (name, card, (step_number, of)) = (job.name_of(step), card.id.clone(), job.place_of_step());
        let event = JobEventKind::Stage {
            name: name.clone(),
            index: step_number,
            of,
            chunking: String::new(),
            cached: true,
            card: card.clone(),
            item: step.item,
            memory: None,
            section: None,
        };
        job.emit(now, event);
        let report = StageReport {
            cached: true,
            card,
            name,
            ..StageReport::default()
        };
        job.stage_done(report, now);
        job.cursor += 1;
        true
    }

    pub(super) fn work_of(&self, job: &JobRecord, step: JobStep, need: &Need) -> Result<Work, Error> {
        let (Some(plan), Some(run)) = (need.plan.clone(), job.run()) else {
            return Ok(Work::Load(need.components.clone()));
        };
        let kept = match job.latents.get(&step.item) {
            Some(id) => self.latents.leased_values(id)?,
            None => Values::new(),
        };
        let later_stages = job
            .steps
            .iter()
            .skip(job.cursor + 1)
            .filter_map(|step| job.stage(*step));
        let mut later_stages: Vec<String> = later_stages.map(|stage| stage.name.clone()).collect();
        later_stages.sort_unstable();
        later_stages.dedup();
        let preview_interval_ms = match plan.preview {
            Some(_) => run.preview_interval_ms,
            None => 0,
        };
        let read = plan.request_for(&run.request);
        let request = match plan.reads_media {
            true => read.of_item(step.item),
            false => read.without_media_data().of_item(step.item),
        };
        Ok(Work::Stage(Box::new(StageWork {
            plan,
            components: need.components.clone(),
            later_request: (!later_stages.is_empty()).then(|| run.request.without_media_data()),
            later_stages,
            later: need.later.clone(),
            request,
            values: job.input(step, &kept),
            preview_interval_ms,
        })))
    }
}
