//! The predicted time of stages on a card, with and without what is streamed to it.

use model::StagePlan;
use residency::{Bytes, Component, Part, StageSeconds, StageTime};

use super::learned::PassTime;
use super::record::JobRecord;
use super::report::Streamed;
use super::view::View;
use crate::need::Need;

impl View<'_> {
    /// How long a pass of a step's stage takes on a card with all components there, if a stage like it ran there, or by the
    /// operations that it says and the speed of the card.
    pub(super) fn pass_time(
        &self,
        job: &JobRecord,
        index: usize,
        card: usize,
        need: &Need,
    ) -> Option<PassTime> {
        let plan = need.plan.as_ref()?;
        let learned = self.learned.pass_seconds(&job.stage_key(index)?, card);
        let by_flops = || self.computing_seconds(plan, card);
        let pass_seconds = learned.or_else(|| by_flops().filter(|seconds| *seconds > 0.0))?;
        Some(PassTime {
            pass_seconds,
            passes: need.passes(),
            passes_in_step: plan.passes.in_step,
        })
    }

    /// Seconds that the operations of a pass of a stage take on a card, if it is known how fast the card is; zero where the family does not
    /// say how many they are.
    pub(super) fn computing_seconds(&self, plan: &StagePlan, card: usize) -> Option<f64> {
        let card = &self.cards[card];
        let flops = plan.passes.flops.on_card(card.description.has_fp8_products());
        Some(flops as f64 / card.speeds.flops.filter(|speed| *speed > 0)? as f64)
    }

    /// The time of a step's stage with these parts of its components, as far as the speeds of the card are known.
    pub(super) fn seconds_of(
        &self,
        job: &JobRecord,
        index: usize,
        card: usize,
        need: &Need,
        parts: &[(Component, Part)],
    ) -> Option<StageSeconds> {
        let time = self.pass_time(job, index, card, need)?;
        self.predict(time, card, parts)
    }

    fn predict(&self, time: PassTime, card: usize, parts: &[(Component, Part)]) -> Option<StageSeconds> {
        let time = StageTime {
            passes: time.passes,
            pass_seconds: time.pass_seconds,
            link: match parts.iter().any(|(_, part)| *part != Part::WHOLE) {
                true => self.cards[card].speeds.link?,
                false => Bytes::ZERO, // nothing crosses it
            },
        };
        Some(time.predict(parts.iter().map(|(component, part)| (component, *part))))
    }

    /// Those of these components of a stage of which a part is on a card, with what that costs where its passes take this time.
    pub(super) fn streamed(
        &self,
        time: Option<PassTime>,
        card: usize,
        parts: &[(Component, Part)],
    ) -> Vec<Streamed> {
        let time = time.filter(|time| time.passes > 1);
        let more = time.and_then(|time| {
            let more = self.predict(time, card, parts)?.more_each_pass;
            Some(more * f64::from(time.passes_in_step))
        });
        let each_pass = |(component, part): &(Component, Part)| component.size_of(*part).streamed;
        let all: Bytes = parts.iter().map(each_pass).sum();
        let in_part = parts.iter().filter(|(_, part)| *part != Part::WHOLE);
        let streamed = in_part.map(|each| Streamed {
            component: each.0.clone(),
            part: each.1,
            link: self.cards[card].speeds.link,
            // Components that are streamed together share what it costs.
            more_seconds: more.map(|more| more * each_pass(each).0 as f64 / all.0.max(1) as f64),
        });
        streamed.collect()
    }

    /// The components of which a part is on a card, with what that cost the last stage that ran with them.
    pub(super) fn streamed_on(&self, card: usize) -> Vec<Streamed> {
        let residents = self.cards[card].ledger.residents();
        let streamed = residents.flat_map(|resident| {
            let (component, part) = (&resident.component, resident.part);
            let time = self.learned.last_pass_time(card, &component.id);
            self.streamed(time, card, &[(component.clone(), part)])
        });
        streamed.collect()
    }
}
